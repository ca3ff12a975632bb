//! Copies: right bytes for every request that is accepted.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::os::fd::AsFd;

use statecopy_descriptors::SealedMemory;
use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::v1::copy_answer::Answer;
use statecopy_proto::v1::copy_request::{Flags, Indices as WireIndices};
use statecopy_proto::v1::{self, DirectedCopy, IndexType, RegionSlice, SharedIndices};
use statecopy_proto::{DataType, Direction};
use statecopy_tests::{
    Daemon, DaemonOptions, Indices, Random, Rig, Session, Shared, WorkerProcess, layer_spec,
    random_bytes,
};

fn layout(dtype: DataType, rows: u64, payload: u64) -> CacheLayout {
    CacheLayout::with_page_stride(dtype, [rows, 1, 1, payload], payload + 8).unwrap()
}

/// `selected` rows that all differ, in an order of their own.
fn distinct(random: &mut Random, rows: u64, selected: u64) -> Vec<i64> {
    let mut values: Vec<i64> = (0..rows.cast_signed()).collect();
    for at in (1..values.len()).rev() {
        values.swap(at, usize::try_from(random.below(at as u64 + 1)).unwrap());
    }
    values.truncate(usize::try_from(selected).unwrap());
    values
}

fn in_width(values: &[i64], narrow: bool) -> Indices {
    if narrow {
        Indices::Int32(values.iter().map(|value| i32::try_from(*value).unwrap()).collect())
    } else {
        Indices::Int64(values.to_vec())
    }
}

#[test]
fn indices_at_and_past_every_end_do_what_the_contract_says() {
    let daemon = Daemon::start();
    for dtype in [DataType::Float32, DataType::Float16] {
        let mut rig = Rig::new(daemon.wire(), &[(layout(dtype, 7, 96), 32)], 16);
        let wide = vec![0, 6, 7, -1, i64::MIN, i64::MAX, 1 << 32, (1 << 32) + 1, -(1 << 32), 3];
        let narrow = vec![0, 6, 7, -1, i32::MIN, i32::MAX, 1 << 16, 8, -7, 3];
        for indices in [Indices::Int64(wide), Indices::Int32(narrow)] {
            let reply = rig.copy(Direction::Gather, 0, &indices, None).unwrap();
            assert_eq!((reply.rows_copied, reply.rows_masked), (3, 7));
            rig.compute(5);
            let reply = rig.copy(Direction::Scatter, 0, &indices, None).unwrap();
            assert_eq!((reply.rows_copied, reply.rows_masked), (3, 7));
        }
        // The same row may be gathered many times.
        let again = Indices::Int32(vec![4; 16]);
        rig.copy(Direction::Gather, 0, &again, None).unwrap();
    }
}

#[test]
fn flags_clear_gathered_rows_and_never_suppress_a_scatter() {
    let daemon = Daemon::start();
    for dtype in [DataType::BFloat16, DataType::UInt8] {
        let mut rig = Rig::new(daemon.wire(), &[(layout(dtype, 8, 40), 16)], 8);
        let indices = Indices::Int64(vec![0, 1, 2, 3, -1, 5, 6, 7]);
        for flags in [[0; 8], [1; 8], [0, 1, 2, 128, 255, 0, 0, 1]] {
            rig.copy(Direction::Gather, 0, &indices, Some(&flags)).unwrap();
            rig.compute(11);
            let reply = rig.copy(Direction::Scatter, 0, &indices, Some(&flags)).unwrap();
            assert_eq!((reply.rows_copied, reply.rows_masked), (7, 1));
        }
    }
}

#[test]
fn bits_are_copied_and_never_computed() {
    let daemon = Daemon::start();
    let mut rig = Rig::new(daemon.wire(), &[(layout(DataType::Float32, 4, 16), 0)], 4);
    // Signalling and quiet NaN with payloads, infinities, -0.0, denormals.
    let words: [u32; 16] = [
        0x7f80_0001,
        0xff80_0001,
        0x7fc0_dead,
        0xffff_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x8000_0000,
        0,
        1,
        0x8000_0001,
        0x007f_ffff,
        0x7fa0_0000,
        0x3f80_0000,
        0xdead_beef,
        0x7fff_ffff,
        2,
    ];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    rig.packed.write(Rig::PACKED_OFFSET, &bytes.repeat(4));
    let indices = Indices::Int32(vec![2, 0, 3, 1]);
    rig.copy(Direction::Scatter, 0, &indices, None).unwrap();
    rig.compute(1);
    rig.copy(Direction::Gather, 0, &indices, None).unwrap();
    let start = usize::try_from(Rig::PACKED_OFFSET).unwrap();
    assert_eq!(rig.packed.model[start..start + 256], bytes.repeat(4));
}

#[test]
fn selecting_nothing_answers_and_launches_nothing() {
    let daemon = Daemon::start();
    let mut rig = Rig::new(daemon.wire(), &[(layout(DataType::Float32, 4, 16), 0)], 4);
    let launches = || -> u64 {
        let plans = &daemon.inspect().devices[0].plans;
        plans.iter().flat_map(|plan| &plan.variants).map(|variant| variant.launches).sum()
    };
    let before = launches();
    for direction in Direction::ALL {
        for indices in [Indices::Int32(Vec::new()), Indices::Int64(Vec::new())] {
            rig.copy(direction, 0, &indices, None).unwrap();
            rig.copy(direction, 0, &indices, Some(&[])).unwrap();
        }
    }
    assert_eq!(launches(), before);
}

#[test]
fn a_set_copies_all_its_layers_by_one_request() {
    let daemon = Daemon::start();
    for dtype in [DataType::Float32, DataType::Int8] {
        let layout = layout(dtype, 9, 56);
        let apart = layout.span_bytes().next_multiple_of(16);
        let layers: Vec<_> = (0..20).map(|at| (layout.clone(), at * apart)).collect();
        let mut rig = Rig::new(daemon.wire(), &layers, 12);
        let mut random = Random::new(3);
        for selected in [0, 1, 5, 9] {
            let mut values = distinct(&mut random, 9, selected);
            values.push(-1);
            let flags: Vec<u8> = values.iter().map(|value| u8::from(value % 3 != 0)).collect();
            rig.copy_all(Direction::Gather, &in_width(&values, true), Some(&flags)).unwrap();
            rig.compute(selected);
            let reply = rig.copy_all(Direction::Scatter, &in_width(&values, false), None).unwrap();
            assert_eq!((reply.rows_copied, reply.rows_masked), (20 * selected, 20));
        }
    }
}

#[test]
fn indices_and_flags_may_lie_in_shared_memory() {
    let daemon = Daemon::start();
    let mut rig = Rig::new(daemon.wire(), &[(layout(DataType::Float32, 12, 64), 0)], 10);
    let mut arguments = Shared::new(random_bytes(8, 4096));
    let region_id = rig.session.share(&arguments);
    let values = vec![11, 0, -1, 12, 3, 3, i64::from(i32::MAX), 5, i64::from(i32::MIN), 7];
    let flags = [1, 1, 1, 1, 0, 9, 1, 0, 1, 1];
    arguments.write(1024, &flags);
    let narrow: Vec<u8> =
        values.iter().flat_map(|value| i32::try_from(*value).unwrap().to_le_bytes()).collect();
    let wide: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    for (kind, bytes) in [(IndexType::IndexInt32, narrow), (IndexType::IndexInt64, wide)] {
        arguments.write(256, &bytes);
        let indices = Indices::Int64(values.clone());
        let mut request = rig.request(0, &indices, None);
        let at = Some(RegionSlice { region_id, offset_bytes: 256 });
        request.indices = Some(WireIndices::Shared(SharedIndices { r#type: kind.into(), at }));
        let at = RegionSlice { region_id, offset_bytes: 1024 };
        request.flags = Some(Flags::SharedFlags(at));
        let reply = rig.session.copy(Direction::Gather, request).unwrap();
        let expected = rig.expect(Direction::Gather, 0..1, &indices, Some(&flags));
        assert_eq!((reply.rows_copied, reply.rows_masked), expected);
        rig.check("after a gather with shared indices");
        arguments.check("after a gather with shared indices");
        rig.compute(2);
    }
}

#[test]
fn a_page_stride_past_four_gib_works_with_int32_indices() {
    let daemon = Daemon::start();
    let mut session = Session::open(daemon.wire());
    // 5 GiB from one row to the next; only the payloads are ever touched.
    let (stride, rows, offset, payload) = (5_u64 << 28, 4_u64, 4096_u64, 4096_u64);
    let layout = CacheLayout::with_page_stride(DataType::Float32, [rows, 1, 1, 1024], stride);
    let layout = layout.unwrap();
    assert!(layout.page_stride_bytes() > 1 << 32);
    let bytes = offset + layout.span_bytes() + 4096;
    let memory = SealedMemory::create("sparse", bytes).unwrap();
    let mapping = memory.map().unwrap();
    let place = |row: u64| offset + row * layout.page_stride_bytes();
    let row_bytes = |seed: u64| random_bytes(seed, payload);
    for row in 0..rows {
        mapping.write(place(row), &row_bytes(row)).unwrap();
    }
    let touched = memory.data_ranges().unwrap();
    let mut packed = Shared::new(random_bytes(100, 4 * payload));
    let region_id = session.offer(memory.as_fd(), bytes).unwrap();
    let packed_region = session.share(&packed);
    let layer = layer_spec(0, &layout.place(offset, bytes).unwrap(), region_id, 4);
    let published = session.register_layers(vec![layer], Vec::new()).unwrap();
    let request = v1::CopyRequest {
        session: session.reference(),
        binding_id: published.bindings[0].binding_id,
        signature: published.bindings[0].signature,
        selected: 4,
        indices: Some(Indices::Int32(vec![3, 0, 4, 1]).to_wire()),
        packed: Some(RegionSlice { region_id: packed_region, offset_bytes: 0 }),
        packed_dtype: v1::DataType::Float32.into(),
        packed_bytes: 4 * payload,
        ..v1::CopyRequest::default()
    };
    session.copy(Direction::Gather, request.clone()).unwrap();
    packed.model = [row_bytes(3), row_bytes(0), vec![0; 4096], row_bytes(1)].concat();
    packed.check("after a gather");
    let states = [row_bytes(23), row_bytes(20), row_bytes(29), row_bytes(21)].concat();
    packed.write(0, &states);
    session.copy(Direction::Scatter, request).unwrap();
    for (row, seed) in [(0, 20), (1, 21), (2, 2), (3, 23)] {
        let mut now = vec![0; 4096];
        mapping.read(place(row), &mut now).unwrap();
        assert_eq!(now, row_bytes(seed), "row {row}");
    }
    assert_eq!(memory.data_ranges().unwrap(), touched);
}

#[test]
fn a_hundred_layers_of_4096_rows_fit_one_call() {
    let daemon = Daemon::start();
    let layout = layout(DataType::UInt8, 4096, 4);
    let apart = layout.span_bytes().next_multiple_of(16);
    let layers: Vec<_> = (0..100).map(|at| (layout.clone(), at * apart)).collect();
    let mut rig = Rig::new(daemon.wire(), &layers, 4096);
    let mut random = Random::new(12);
    let mut copies = Vec::new();
    let mut asked = Vec::new();
    for layer in 0..100 {
        // Wide indices of large values: the longest that a request can be.
        let mut values = distinct(&mut random, 4096, 4096);
        values[layer] = i64::MIN;
        let flags: Vec<u8> = (0..4096).map(|_| random.word().to_le_bytes()[0] & 1).collect();
        let indices = Indices::Int64(values);
        let request = rig.request(layer, &indices, Some(&flags));
        let copy = Some(v1::CopyRequest { session: None, ..request });
        copies.push(DirectedCopy { direction: v1::Direction::Gather.into(), copy });
        asked.push((layer, indices, flags));
    }
    let reply = rig.session.copy_many(copies).unwrap();
    assert_eq!(reply.answers.len(), 100);
    // Each gather writes the same packed buffer; the last one stays.
    for ((layer, indices, flags), answer) in asked.iter().zip(reply.answers) {
        let expected = rig.expect(Direction::Gather, *layer..layer + 1, indices, Some(flags));
        let Some(Answer::Done(done)) = answer.answer else { panic!("{answer:?}") };
        assert_eq!((done.rows_copied, done.rows_masked), expected);
    }
    rig.check("after 100 gathers in one call");
}

#[test]
fn several_copies_in_one_call_run_in_order_and_a_refused_one_does_not_stop_the_next() {
    let daemon = Daemon::start();
    let mut rig = Rig::new(daemon.wire(), &[(layout(DataType::Float32, 6, 32), 0)], 4);
    let copy = |rig: &Rig, direction: v1::Direction, indices: &Indices| {
        let request = rig.request(0, indices, None);
        let copy = Some(v1::CopyRequest { session: None, ..request });
        DirectedCopy { direction: direction.into(), copy }
    };
    let (one, other) = (Indices::Int32(vec![1, 2]), Indices::Int32(vec![3, 4]));
    // Moves rows 1 and 2 to 3 and 4, with a refused request between.
    let copies = vec![
        copy(&rig, v1::Direction::Gather, &one),
        copy(&rig, v1::Direction::Gather, &Indices::Int32(vec![0; 5])),
        copy(&rig, v1::Direction::Scatter, &other),
        copy(&rig, v1::Direction::Unspecified, &other),
    ];
    let answers = rig.session.copy_many(copies).unwrap().answers;
    rig.expect(Direction::Gather, 0..1, &one, None);
    rig.expect(Direction::Scatter, 0..1, &other, None);
    rig.check("after copies in order");
    let done: Vec<bool> =
        answers.iter().map(|it| matches!(it.answer, Some(Answer::Done(_)))).collect();
    assert_eq!(done, [true, false, true, false], "{answers:?}");
}

#[test]
fn copies_of_four_worker_processes_do_not_disturb_each_other() {
    let daemon = Daemon::start();
    let mut workers: Vec<WorkerProcess> =
        (0..4).map(|_| WorkerProcess::start(&daemon.control_socket())).collect();
    for worker in &mut workers {
        worker.order("register");
    }
    for worker in &mut workers {
        worker.answer();
    }
    for (seed, worker) in workers.iter_mut().enumerate() {
        worker.order(&format!("random {seed} 150"));
    }
    for worker in &mut workers {
        assert_eq!(worker.answer(), "right");
    }
    let status = daemon.inspect();
    assert_eq!(status.sessions.len(), 4);
    assert!(status.sessions.iter().all(|session| session.copies == 150), "{status:?}");
    assert_eq!(status.devices[0].plans.len(), 1);
}

#[test]
fn serving_enters_no_compiler_no_environment_and_no_allocator() {
    // Each entry after a seal ends the device process of this daemon.
    let daemon = DaemonOptions::default().setting("debug.abort_after_seal", "true").start();
    let device = daemon.device_process();
    for dtype in [DataType::Float32, DataType::BFloat16, DataType::Float16, DataType::Float64] {
        let mut rig = Rig::new(daemon.wire(), &[(layout(dtype, 8, 200), 16)], 8);
        let mut random = Random::new(1);
        for selected in 0..8 {
            let values = distinct(&mut random, 8, selected);
            for direction in Direction::ALL {
                for narrow in [true, false] {
                    rig.copy(direction, 0, &in_width(&values, narrow), None).unwrap();
                }
            }
        }
    }
    assert_eq!(daemon.device_process(), device);
    for door in ["compiler", "environment", "device_allocator"] {
        assert_eq!(daemon.counter("statecopy_entries_while_serving_total", door), 0, "{door}");
    }
    assert!(daemon.counter("statecopy_entries_total", "compiler") > 0);
}

mod slow {
    use super::*;

    /// Rows of each layer, and the most that are selected.
    const ROWS: u64 = 131;

    fn counts_are_exact(rig: &mut Rig, counts: impl IntoIterator<Item = u64>) {
        let mut random = Random::new(rig.layers[0].placement.layout().payload_bytes());
        for selected in counts {
            let values = distinct(&mut random, ROWS, selected);
            let narrow = selected % 2 == 0;
            rig.copy(Direction::Gather, 0, &in_width(&values, narrow), None).unwrap();
            rig.compute(selected);
            rig.copy(Direction::Scatter, 0, &in_width(&values, !narrow), None).unwrap();
        }
    }

    #[test]
    fn every_count_of_rows_in_both_widths_and_directions_is_exact() {
        let daemon = Daemon::start();
        for dtype in [DataType::BFloat16, DataType::Float32] {
            let mut rig = Rig::new(daemon.wire(), &[(layout(dtype, ROWS, 129), 16)], ROWS);
            counts_are_exact(&mut rig, 0..=ROWS);
            let plans = daemon.inspect().devices[0].plans.clone();
            assert_eq!(plans.len(), 1);
            assert_eq!(plans[0].variants.len(), 4, "still four variants: {plans:?}");
        }
    }

    #[test]
    fn payloads_below_at_and_above_a_block_are_exact() {
        let daemon = Daemon::start();
        for payload in [8_191, 8_192, 8_193] {
            let layout = layout(DataType::BFloat16, ROWS, payload);
            let mut rig = Rig::new(daemon.wire(), &[(layout, 16)], ROWS);
            counts_are_exact(&mut rig, [0, 1, 2, 3, 31, 64, 130, ROWS]);
        }
    }

    #[test]
    fn random_layouts_and_requests_are_exact() {
        let daemon = Daemon::start();
        let mut random = Random::new(20);
        for _ in 0..60 {
            let dtype = DataType::ALL[usize::try_from(random.below(16)).unwrap()];
            let shape = [
                1 + random.below(9),
                1 + random.below(4),
                1 + random.below(5),
                1 + random.below(40),
            ];
            let payload: u64 = shape[1..].iter().product();
            let page = payload + random.below(3) * random.below(100);
            let layout = CacheLayout::with_page_stride(dtype, shape, page).unwrap();
            let offset = random.below(40) * dtype.item_bytes();
            let mut rig = Rig::new(daemon.wire(), &[(layout, offset)], 16);
            for _ in 0..20 {
                let mut values = distinct(&mut random, shape[0], 8);
                values.extend([-1, shape[0].cast_signed()]);
                values.truncate(usize::try_from(random.below(11)).unwrap());
                let flags: Vec<u8> =
                    values.iter().map(|_| random.word().to_le_bytes()[0] & 1).collect();
                let direction = Direction::ALL[usize::from(random.below(2) == 0)];
                let indices = in_width(&values, random.below(2) == 0);
                rig.compute(random.word());
                rig.copy(direction, 0, &indices, (random.below(2) == 0).then_some(&flags)).unwrap();
            }
        }
    }
}
