//! Every case: a sentence that says what holds, and the function that finds out.

mod copies;
mod graphs;
mod lives;
mod memory;
mod order;
mod refusals;
mod starts;
mod stream_lives;

use anyhow::Result;

use crate::setup::Setup;

/// What a case needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// A driver, whether a device is behind it or not.
    Driver,
    /// A device.
    Device,
}

/// One case. It runs in a process of its own, and answers with what it saw.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    needs: Needs,
    /// Whether a process dies in a kernel of its own: with MPS that ends every other process on the device, too.
    dies_in_a_kernel: bool,
    pub(crate) run: fn(&Setup) -> Result<String>,
}

impl Case {
    const fn new(name: &'static str, run: fn(&Setup) -> Result<String>) -> Self {
        Self { name, needs: Needs::Driver, dies_in_a_kernel: false, run }
    }

    const fn needing_a_device(name: &'static str, run: fn(&Setup) -> Result<String>) -> Self {
        Self { needs: Needs::Device, ..Self::new(name, run) }
    }

    const fn dying_in_a_kernel(self) -> Self {
        Self { dies_in_a_kernel: true, ..self }
    }

    /// What a case needs and does not have.
    pub(crate) fn lacks(&self, setup: &Setup) -> Option<&'static str> {
        match self.needs {
            Needs::Device if setup.small => Some("a device"),
            Needs::Driver | Needs::Device => {
                (self.dies_in_a_kernel && setup.mps).then_some("a device without MPS")
            }
        }
    }
}

/// All, in the order in which they run.
pub(crate) const CASES: &[Case] = &[
    Case::new("fp32_is_copied_by_a_fused_plan", copies::fp32),
    Case::new("bf16_is_copied_by_a_fused_plan", copies::bf16),
    Case::new("fp16_is_copied_by_the_byte_copy", copies::fp16),
    Case::new("int8_is_copied_by_the_byte_copy", copies::int8),
    Case::new("fp64_is_copied_by_the_byte_copy", copies::fp64),
    Case::new("every_selected_count_is_exact", copies::every_count),
    Case::new("inputs_past_a_kernels_parameter_are_exact", copies::many_rows),
    Case::new("every_bit_pattern_survives", copies::bit_patterns),
    Case::new("every_base_alignment_and_odd_payload_is_exact", copies::alignments),
    Case::new("a_batch_of_69_layers_is_one_request", copies::batch),
    Case::new("a_copy_of_many_launches_is_exact", copies::many_launches),
    Case::new("int32_reaches_pages_more_than_4_gib_apart", copies::far_pages),
    Case::new("a_copy_comes_after_its_streams_producer_and_before_its_consumer", order::producers),
    Case::new("lanes_that_are_new_take_no_memory_of_the_device", order::first_launches),
    Case::new("accepted_copies_without_their_bells_hold_nobody_up", order::unrung),
    Case::new("copies_go_on_while_kernels_of_others_come_and_go", order::new_classes),
    Case::new("fp32_is_copied_in_a_stream", order::fp32),
    Case::new("bf16_is_copied_in_a_stream", order::bf16),
    Case::new("fp16_is_copied_in_a_stream", order::fp16),
    Case::new("more_than_2_to_the_20_rings_of_one_lane_are_exact", order::many_rings),
    Case::new("fp32_is_copied_by_a_replayed_graph", graphs::fp32),
    Case::new("bf16_is_copied_by_a_replayed_graph", graphs::bf16),
    Case::new("fp16_is_copied_by_a_replayed_graph", graphs::fp16),
    Case::new("each_of_many_replays_copies_what_its_stream_made", graphs::many_replays),
    Case::new("a_capture_is_not_disturbed_by_copies_of_other_streams", graphs::undisturbed_capture),
    Case::new("a_graph_is_replayed_after_sleep_and_wake", graphs::sleep),
    Case::new("a_graph_of_what_is_gone_moves_nothing_and_frees_its_stream", graphs::stale),
    Case::needing_a_device("small_allocations_are_shared", memory::small_allocations),
    Case::new("64_layers_of_one_allocation_are_one_mapping", memory::one_mapping),
    Case::new("pieces_of_20_mib_are_side_by_side", memory::large_pieces),
    Case::new("pieces_of_2_mib_are_side_by_side", memory::small_pieces),
    Case::new("3000_pieces_need_few_descriptors", memory::many_pieces),
    Case::new("memory_of_a_pool_is_refused", memory::pool),
    Case::new("virtual_memory_without_handles_is_refused", memory::hidden),
    Case::new("sleep_frees_the_memory_and_wake_binds_again", memory::sleep),
    Case::new("a_device_that_is_not_there_is_refused", refusals::wrong_uuid),
    Case::new("a_truncated_handle_is_refused", refusals::truncated_handle),
    Case::new("a_handle_of_another_size_is_refused", refusals::wrong_size),
    Case::new("a_handle_of_another_allocation_is_refused", refusals::wrong_buffer),
    Case::new("a_handle_of_freed_memory_is_refused", refusals::freed),
    Case::new("a_handle_that_comes_back_is_noticed", refusals::returning_handle),
    Case::new("a_descriptor_of_another_size_is_refused", refusals::wrong_descriptor),
    Case::new("a_descriptor_of_no_device_memory_is_refused", refusals::foreign_descriptor),
    Case::new("an_idle_worker_killed_gives_its_memory_back", lives::idle_worker),
    Case::new("a_worker_killed_before_it_registers_gives_its_memory_back", lives::sending_worker),
    Case::new("a_worker_killed_while_it_copies_gives_its_memory_back", lives::copying_worker),
    Case::new("a_worker_killed_before_its_bell_leaves_no_scatter_behind", lives::unrung_worker),
    Case::new("a_worker_killed_while_its_stream_waits_leaves_no_scatter", lives::waiting_worker),
    Case::new("a_worker_killed_after_its_bell_has_its_scatter_made", lives::rung_worker),
    Case::new("a_worker_killed_while_its_graph_is_replayed_hurts_nobody", lives::replaying_worker),
    Case::new("a_worker_killed_in_any_phase_of_a_replay_hurts_nobody", lives::graph_workers),
    Case::new(
        "a_device_process_killed_in_any_phase_of_a_replay_is_made_up_for",
        stream_lives::replay_phases,
    ),
    Case::new(
        "a_daemon_killed_in_any_phase_of_a_replay_frees_the_stream",
        stream_lives::daemon_phases,
    ),
    Case::new("streams_go_on_when_the_daemon_dies_and_are_told", stream_lives::daemon),
    Case::new(
        "copies_that_had_rung_are_made_by_the_next_device_process",
        stream_lives::rung_copies,
    ),
    Case::new("copies_that_ran_are_made_by_the_next_device_process", stream_lives::running_copies)
        .dying_in_a_kernel(),
    Case::new("words_that_a_worker_scribbles_over_hurt_nobody_else", stream_lives::scribbled_words),
    Case::needing_a_device(
        "a_fault_of_a_workers_own_kernel_hurts_nobody_else",
        lives::faulted_worker,
    )
    .dying_in_a_kernel(),
    Case::new("memory_freed_under_the_daemon_hurts_nobody_else", lives::freed_under_the_daemon)
        .dying_in_a_kernel(),
    Case::new("bindings_outlive_the_device_process", lives::device_process),
    Case::new("workers_go_on_with_the_next_daemon", lives::next_daemon),
    Case::new("the_footprint_on_the_device_is_shown", starts::footprint),
    Case::new("a_daemon_without_kernels_is_not_ready_and_names_the_chip", starts::no_kernels),
    Case::new("a_daemon_without_memory_is_not_ready_and_says_so", starts::no_memory),
];
