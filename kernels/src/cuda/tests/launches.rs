//! Launches: what they carry, how they end, and that nothing but them reaches the driver while serving.

use std::time::{Duration, Instant};

use statecopy_proto::{Direction, IndexWidth, PlanKind};
use statecopy_stub_cuda::{Act, CUresult, Fault, Function, Whose};

use super::*;
use crate::conformance::{assert_bytes, cache, noise, outcome};
use crate::device::{DeviceFault, Flags, Indices, Launch, Launcher as _, Moved, Slice, Ticket};
use crate::layout::CacheLayout;
use crate::reference;

const ROWS: u64 = 10;
/// How long something may take that is done at once.
const PATIENCE: Duration = Duration::from_secs(10);

/// One bound layer of small rows and everything to gather it.
pub(super) struct Gathering {
    pub(super) launcher: CudaLauncher,
    pub(super) variants: CudaVariants,
    caches: CudaCaches,
    pub(super) packed: Arc<CudaRegion>,
    pub(super) layout: CacheLayout,
    pub(super) contents: Vec<u8>,
}

/// The class of a fused plan over a layout.
pub(super) fn class_of(layout: &CacheLayout) -> KernelClass {
    KernelClass {
        kind: PlanKind::Fused,
        dtype: layout.dtype(),
        payload_bytes: layout.payload_bytes(),
        base_mod_16: 0,
    }
}

impl Gathering {
    pub(super) fn of(bed: &Bed) -> Self {
        let layout = cache(DataType::Float32, ROWS, 4, 6);
        let region = Arc::new(bed.device.scratch(layout.span_bytes()).unwrap());
        let contents = noise(layout.span_bytes(), 1);
        region.write(0, &contents).unwrap();
        let placement = layout.place(0, region.bytes()).unwrap();
        Self {
            launcher: bed.device.launcher().unwrap(),
            variants: bed.device.compile(&class_of(&layout)).unwrap(),
            caches: bed.device.bind(&[(region, placement)]).unwrap(),
            packed: Arc::new(bed.device.scratch(SELECTED_MAX * layout.payload_bytes()).unwrap()),
            layout,
            contents,
        }
    }

    fn launch(
        &mut self,
        indices: Indices<'_, CudaRegion>,
        selected: usize,
        flags: Flags<'_, CudaRegion>,
    ) -> Result<Ticket, DeviceFault> {
        self.start(indices, selected, flags, CudaLauncher::launch)
    }

    pub(super) fn start<T>(
        &mut self,
        indices: Indices<'_, CudaRegion>,
        selected: usize,
        flags: Flags<'_, CudaRegion>,
        by: impl FnOnce(&mut CudaLauncher, &Launch<'_, CudaDevice>) -> T,
    ) -> T {
        self.start_part(indices, selected, flags, selected as u64, by)
    }

    fn start_part<T>(
        &mut self,
        indices: Indices<'_, CudaRegion>,
        selected: usize,
        flags: Flags<'_, CudaRegion>,
        rows: u64,
        by: impl FnOnce(&mut CudaLauncher, &Launch<'_, CudaDevice>) -> T,
    ) -> T {
        let selected = selected as u64;
        let bytes = selected * self.layout.payload_bytes();
        let launch = Launch {
            kind: PlanKind::Fused,
            variants: &self.variants,
            caches: &self.caches,
            direction: Direction::Gather,
            selected,
            indices,
            flags,
            packed: Slice::new(&self.packed, 0, bytes).unwrap(),
            part: 0..rows,
        };
        by(&mut self.launcher, &launch)
    }

    /// Starts the first rows of a gather of the fourth row.
    pub(super) fn start_rows<T>(
        &mut self,
        rows: u64,
        by: impl FnOnce(&mut CudaLauncher, &Launch<'_, CudaDevice>) -> T,
    ) -> T {
        self.start_part(Indices::Int32(&[3]), 1, Flags::None, rows, by)
    }

    pub(super) fn launch_one(&mut self) -> Result<Ticket, DeviceFault> {
        self.launch(Indices::Int32(&[3]), 1, Flags::None)
    }

    pub(super) fn outcome(&mut self, ticket: Ticket) -> Moved {
        outcome::<CudaDevice>(&mut self.launcher, ticket)
    }

    /// Polls until the device is seen to have failed.
    pub(super) fn fault(&mut self, ticket: Ticket) -> DeviceFault {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.launcher.poll(ticket) {
                Ok(None) => assert!(Instant::now() < deadline, "The fault is not seen"),
                Ok(Some(moved)) => panic!("{moved:?} after a fault"),
                Err(fault) => return fault,
            }
        }
    }
}

/// From none to well past what fits the parameter, with every index width, with and without flags.
#[test]
fn inline_indices_and_flags_of_every_number_are_exact() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    let layer = [gathering.layout.place(0, 1 << 20).unwrap()];
    for selected in (0..1100).chain([4096]) {
        let wide: Vec<i64> = (0..selected).map(|s| (s * 7 + 3) % 12 - 1).collect();
        let narrow: Vec<i32> = wide.iter().map(|it| i32::try_from(*it).unwrap()).collect();
        let private: Vec<u8> = (0..selected).map(|s| u8::from(s % 3 != 0) * 9).collect();
        let selected = wide.len();
        for width in IndexWidth::ALL {
            for flagged in [false, true] {
                let indices = match width {
                    IndexWidth::Int32 => Indices::Int32(&narrow),
                    IndexWidth::Int64 => Indices::Int64(&wide),
                };
                let flags = if flagged { Flags::Inline(&private) } else { Flags::None };
                let ticket = gathering.launch(indices, selected, flags).unwrap();
                let moved = gathering.outcome(ticket);
                let bytes = selected * usize::try_from(gathering.layout.payload_bytes()).unwrap();
                let mut expected = vec![1; bytes];
                let flags = flagged.then_some(&private[..]);
                let contents = &gathering.contents;
                let counted = reference::gather(contents, &layer, &wide, flags, &mut expected);
                assert_eq!(moved, counted, "{selected} {width:?} {flagged}");
                let mut packed = vec![0; bytes];
                gathering.packed.read(0, &mut packed).unwrap();
                assert_bytes(&packed, &expected, || format!("{selected} {width:?} {flagged}"));
            }
        }
    }
}

#[test]
fn as_many_launches_are_under_way_as_there_are_tickets() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    bed.stub.hold_kernels(Some(Whose::Any));
    for round in 0..3 {
        let mut tickets = Vec::new();
        while gathering.launcher.has_room() {
            tickets.push(gathering.launch_one().unwrap());
        }
        assert_eq!(tickets.len(), TICKETS_MAX);
        for ticket in &tickets {
            assert_eq!(gathering.launcher.poll(*ticket), Ok(None));
        }
        bed.stub.hold_kernels(None);
        // In another order in each round: room comes back whatever is polled first.
        tickets.rotate_left(round * 20);
        for ticket in tickets {
            assert_eq!(gathering.outcome(ticket), Moved { copied: 1, masked: 0 });
        }
        assert!(gathering.launcher.has_room());
        bed.stub.hold_kernels(Some(Whose::Any));
    }
}

#[test]
#[should_panic(expected = "launches await their poll")]
fn a_launch_without_room_is_a_broken_invariant() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    for _ in 0..=TICKETS_MAX {
        let _ticket = gathering.launch_one();
    }
}

#[test]
fn a_worker_that_launches_itself_waits_in_the_driver_and_asks_for_no_word() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    let before = bed.report();
    for turn in 0..3 * i32::try_from(TICKETS_MAX).unwrap() {
        let indices = [turn % 10, -1, 10, 3];
        let flags = Flags::Inline(&[1, 1, 1, 0]);
        let moved =
            gathering.start(Indices::Int32(&indices), 4, flags, CudaLauncher::enqueue).unwrap();
        assert_eq!(moved, Moved { copied: 1, masked: 3 });
    }
    gathering.launcher.synchronize().unwrap();
    let after = bed.report();
    let calls = |function| after.count(function) - before.count(function);
    assert_eq!(calls(Function::cuLaunchKernel), 3 * TICKETS_MAX as u64);
    assert_eq!(calls(Function::cuStreamSynchronize), 1);
    assert_eq!(calls(Function::cuStreamWriteValue64_v2), 0);
    let bytes = usize::try_from(gathering.layout.payload_bytes()).unwrap();
    let mut expected = vec![1; 4 * bytes];
    let layer = [gathering.layout.place(0, 1 << 20).unwrap()];
    let last = i64::try_from((3 * TICKETS_MAX - 1) % 10).unwrap();
    let (rows, flags) = ([last, -1, 10, 3], [1, 1, 1, 0]);
    reference::gather(&gathering.contents, &layer, &rows, Some(&flags), &mut expected);
    let mut packed = vec![1; 4 * bytes];
    gathering.packed.read(0, &mut packed).unwrap();
    assert_bytes(&packed, &expected, || "after the last launch");

    bed.stub.fault_next_kernel(Some(Whose::Any));
    gathering.start(Indices::Int32(&[1]), 1, Flags::None, CudaLauncher::enqueue).unwrap();
    let fault = gathering.launcher.synchronize().unwrap_err();
    assert!(fault.0.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{fault}");
}

#[test]
fn a_fault_of_the_device_is_seen_by_the_poll_and_by_every_later_launch() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    let ticket = gathering.launch_one().unwrap();
    gathering.outcome(ticket);
    bed.stub.hold_kernels(Some(Whose::Any));
    bed.stub.fault_next_kernel(Some(Whose::Any));
    let tickets = [gathering.launch_one().unwrap(), gathering.launch_one().unwrap()];
    bed.stub.hold_kernels(None);
    for ticket in tickets {
        let fault = gathering.fault(ticket);
        assert!(fault.0.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{fault}");
    }
    let fault = gathering.launch_one().unwrap_err();
    assert!(fault.0.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{fault}");
    // What the device may still write stays where it is until the process ends.
    let before = bed.report();
    drop(gathering);
    let after = bed.report();
    for function in Function::ALL {
        let calls = after.count(*function) - before.count(*function);
        assert_eq!(calls, 0, "{} after a fault", function.name());
    }
}

#[test]
fn a_launch_that_the_driver_refuses_is_a_fault() {
    for function in [
        Function::cuGraphExecKernelNodeSetParams_v2,
        Function::cuGraphLaunch,
        Function::cuStreamWriteValue64_v2,
    ] {
        let bed = Bed::open();
        let mut gathering = Gathering::of(&bed);
        bed.stub.arm(function, Fault::next(Act::Answer(CUresult(719))));
        let fault = gathering.launch_one().unwrap_err();
        assert!(fault.0.contains("CUDA_ERROR_LAUNCH_FAILED"), "{fault}");
    }
}

#[test]
fn serving_asks_the_driver_for_launches_and_words_and_nothing_else() {
    const LAUNCHES: u64 = 100;
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    let inputs = Arc::new(bed.device.scratch(64).unwrap());
    let shared = Slice::new(&inputs, 0, 40).unwrap();
    let before = bed.report();
    bed.stub.abort_on_allocation(Some(Whose::Any));
    for launch in 0..LAUNCHES {
        let indices = match launch % 2 {
            0 => Indices::Int32(&[1; 10]),
            _ => Indices::Shared(IndexWidth::Int32, shared),
        };
        let ticket = gathering.launch(indices, 10, Flags::None).unwrap();
        gathering.outcome(ticket);
    }
    bed.stub.abort_on_allocation(None);
    let after = bed.report();
    for function in Function::ALL {
        let calls = after.count(*function) - before.count(*function);
        match function {
            Function::cuGraphExecKernelNodeSetParams_v2
            | Function::cuGraphLaunch
            | Function::cuStreamWriteValue64_v2 => assert_eq!(calls, LAUNCHES),
            // Now and then, where a launch takes long.
            Function::cuStreamQuery => {}
            _ => assert_eq!(calls, 0, "{}", function.name()),
        }
    }
}

#[test]
fn a_launcher_that_goes_with_a_launch_under_way_leaves_the_words_to_the_device() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    bed.stub.hold_kernels(Some(Whose::Any));
    let _ticket = gathering.launch_one().unwrap();
    let idle = bed.device.launcher().unwrap();
    let host_memory = || bed.report().live(Object::HostAllocation);
    assert_eq!(host_memory(), 2);
    drop(std::mem::replace(&mut gathering.launcher, idle));
    assert_eq!(host_memory(), 2, "the device may still write it");
    bed.stub.hold_kernels(None);
    let ticket = gathering.launch_one().unwrap();
    gathering.outcome(ticket);
    drop(gathering);
    assert_eq!(host_memory(), 1);
}
