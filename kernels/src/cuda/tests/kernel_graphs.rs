//! Launches by graphs of a kernel: who has one, and what becomes of it.

use std::mem;

use statecopy_proto::{Direction, IndexWidth};
use statecopy_stub_cuda::{Act, CUresult, Fault, Function, Whose};

use super::launches::{Gathering, class_of};
use super::*;
use crate::conformance::cache;
use crate::device::{Flags, Indices, Launch, Launcher as _, Moved, Slice, Ticket};
use crate::plan::Variant;

const GATHER: Variant = Variant::Fused(Direction::Gather, IndexWidth::Int32);

const MADE_OF: [Function; 4] = [
    Function::cuGraphCreate,
    Function::cuGraphAddKernelNode_v2,
    Function::cuGraphInstantiateWithFlags,
    Function::cuGraphUpload,
];

fn no_memory() -> Fault {
    Fault::next(Act::Answer(CUresult::OUT_OF_MEMORY))
}

/// How many launches went each way since: by a graph, by a launch of the kernel.
fn ways(bed: &Bed, since: &ProcessReport) -> [u64; 2] {
    let now = bed.report();
    [Function::cuGraphLaunch, Function::cuLaunchKernel].map(|it| now.count(it) - since.count(it))
}

/// So many launches at once, and how many went each way.
fn launched(bed: &Bed, gathering: &mut Gathering, launches: usize) -> [u64; 2] {
    let before = bed.report();
    bed.stub.hold_kernels(Some(Whose::Any));
    let tickets: Vec<_> = (0..launches).map(|_| gathering.launch_one().unwrap()).collect();
    let ways = ways(bed, &before);
    bed.stub.hold_kernels(None);
    for ticket in tickets {
        assert_eq!(gathering.outcome(ticket), Moved { copied: 1, masked: 0 });
    }
    ways
}

#[test]
fn a_graph_is_for_one_launch_at_a_time_and_more_launches_do_without() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    for _ in 0..3 {
        assert_eq!(launched(&bed, &mut gathering, 9), [4, 5]);
    }
}

#[test]
fn variants_of_one_class_have_one_module_and_its_graphs() {
    let bed = Bed::open();
    let loaded = || {
        let report = bed.report();
        [Object::Module, Object::Executable, Object::Graph].map(|object| report.live(object))
    };
    let classes = [(4, 6), (8, 8), (12, 16)]
        .map(|(payload, stride)| class_of(&cache(DataType::Float32, 10, payload, stride)));
    let first = classes.each_ref().map(|class| bed.device.compile(class).unwrap());
    assert_eq!(loaded(), [1, 16, 16], "four of each variant");
    let ragged = bed.device.compile(&class_of(&cache(DataType::Float32, 10, 3, 4))).unwrap();
    assert_eq!(loaded(), [2, 32, 32]);
    drop(first);
    assert_eq!(loaded(), [1, 16, 16]);
    drop(ragged);
    assert_eq!(loaded(), [0, 0, 0]);
    let _again = bed.device.compile(&classes[0]).unwrap();
    assert_eq!(loaded(), [1, 16, 16]);
}

#[test]
fn a_driver_that_makes_no_graphs_launches_kernels_and_nothing_of_the_attempt_is_left() {
    for (function, nth) in MADE_OF.into_iter().flat_map(|function| [(function, 1), (function, 3)]) {
        let bed = Bed::open();
        let launcher = bed.device.launcher().unwrap();
        let held = bed.held();
        bed.stub.arm(function, no_memory().nth(nth).lasting());
        let variants = bed.device.compile(&class_of(&cache(DataType::Float32, 10, 4, 6))).unwrap();
        let mut expected = held.clone();
        expected.push((Object::Module, 1));
        let mut with_module = bed.held();
        with_module.sort_by_key(|(object, _)| *object as usize);
        expected.sort_by_key(|(object, _)| *object as usize);
        assert_eq!(with_module, expected, "{} number {nth}", function.name());
        drop((variants, launcher));
        let mut gathering = Gathering::of(&bed);
        assert_eq!(launched(&bed, &mut gathering, 3), [0, 3], "without {}", function.name());
    }
}

#[test]
fn a_graph_that_the_driver_does_not_launch_is_done_without() {
    for function in [Function::cuGraphExecKernelNodeSetParams_v2, Function::cuGraphLaunch] {
        let bed = Bed::open();
        let mut gathering = Gathering::of(&bed);
        bed.stub.arm(function, no_memory());
        let before = bed.report();
        let ticket = gathering.launch_one().unwrap();
        assert_eq!(gathering.outcome(ticket), Moved { copied: 1, masked: 0 });
        assert_eq!(
            bed.report().count(Function::cuLaunchKernel),
            before.count(Function::cuLaunchKernel) + 1
        );
        assert_eq!(launched(&bed, &mut gathering, 5), [4, 1], "it was given back");
    }
}

#[test]
fn a_launch_of_no_rows_takes_no_graph() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    let empty = gathering.start_rows(0, CudaLauncher::launch).unwrap();
    assert_eq!(launched(&bed, &mut gathering, 4), [4, 0]);
    assert_eq!(gathering.outcome(empty), Moved::default());
}

#[test]
fn a_graph_whose_end_nobody_learns_of_is_never_launched_again() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    bed.stub.hold_kernels(Some(Whose::Any));
    // Its kernel runs, and no word will tell of the end.
    bed.stub.arm(Function::cuStreamWriteValue64_v2, no_memory());
    gathering.launch_one().unwrap_err();
    // And one that runs when its launcher goes.
    let _ticket = gathering.launch_one().unwrap();
    let next = bed.device.launcher().unwrap();
    drop(mem::replace(&mut gathering.launcher, next));
    assert_eq!(launched(&bed, &mut gathering, 4), [2, 2]);
    drop(gathering);
    let report = bed.report();
    let kept = [Object::Module, Object::Executable].map(|object| report.live(object));
    assert_eq!(kept, [1, 2], "what may run stays, and its code");
}

/// Gathers of one row in a stream's order, to the start of packed. Index `n` of the inputs names row `n mod 10`.
struct Ordered<'a> {
    gathering: &'a mut Gathering,
    inputs: Arc<CudaRegion>,
}

impl<'a> Ordered<'a> {
    fn of(bed: &Bed, gathering: &'a mut Gathering) -> Self {
        let inputs = Arc::new(bed.device.scratch(16 * 64).unwrap());
        let indices = (0..64).flat_map(|at| [at % 10, 0, 0, 0]).flat_map(i32::to_le_bytes);
        inputs.write(0, &indices.collect::<Vec<u8>>()).unwrap();
        Self { gathering, inputs }
    }

    fn with<T>(
        &mut self,
        at: u64,
        by: impl FnOnce(&mut CudaLauncher, &Launch<'_, CudaDevice>) -> T,
    ) -> T {
        let shared = Slice::new(&self.inputs, at * 16, 4).unwrap();
        self.gathering.start(Indices::Shared(IndexWidth::Int32, shared), 1, Flags::None, by)
    }

    fn expect(&mut self, at: u64) {
        self.with(at, |launcher, launch| launcher.expect(launch)).unwrap();
    }

    fn launch(&mut self, at: u64) -> Ticket {
        self.with(at, |launcher, launch| launcher.launch_in_order(launch, 3, None).unwrap())
    }

    /// Waits for it, and looks at the row.
    fn finish(&mut self, ticket: Ticket, at: u64) {
        let Gathering { packed, layout, contents, .. } = &mut *self.gathering;
        let (packed, bytes) = (Arc::clone(packed), layout.payload_bytes());
        let row = usize::try_from((at % 10) * layout.page_stride_bytes()).unwrap();
        let bytes = usize::try_from(bytes).unwrap();
        let expected = contents[row..row + bytes].to_vec();
        assert_eq!(self.gathering.outcome(ticket), Moved { copied: 1, masked: 0 });
        let mut found = vec![0; bytes];
        packed.read(0, &mut found).unwrap();
        assert_eq!(found, expected, "row {}", at % 10);
    }
}

#[test]
fn what_was_expected_is_launched_by_one_call_and_what_was_not_by_two() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    let mut ordered = Ordered::of(&bed, &mut gathering);
    let calls = || {
        let report = bed.report();
        [Function::cuGraphExecKernelNodeSetParams_v2, Function::cuGraphLaunch]
            .map(|function| report.count(function))
    };
    let [sets, launches] = calls();
    for _ in 0..3 {
        ordered.expect(1);
    }
    assert_eq!(calls(), [sets + 1, launches], "nothing runs, and it is prepared for once");
    let ticket = ordered.launch(1);
    assert_eq!(calls(), [sets + 1, launches + 1]);
    ordered.finish(ticket, 1);
    let ticket = ordered.launch(1);
    assert_eq!(calls(), [sets + 2, launches + 2], "it was expected once");
    ordered.finish(ticket, 1);
    ordered.expect(1);
    let ticket = ordered.launch(2);
    assert_eq!(calls(), [sets + 4, launches + 3], "another one came");
    ordered.finish(ticket, 2);
    ordered.gathering.start_rows(1, |launcher, launch| launcher.expect(launch)).unwrap();
    assert_eq!(calls()[0], sets + 4, "its indices come with it");
}

#[test]
fn the_launch_that_comes_is_made_whatever_was_expected() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    let mut ordered = Ordered::of(&bed, &mut gathering);
    for turn in 0..200 {
        for expected in 0..turn % 7 {
            ordered.expect((turn * 5 + expected * 3) % 64);
        }
        let at = (turn * 11) % 64;
        let ticket = ordered.launch(at);
        ordered.finish(ticket, at);
    }
}

#[test]
fn expectations_take_no_graph_from_a_launch_that_has_come() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    let mut ordered = Ordered::of(&bed, &mut gathering);
    let sets = || bed.report().count(Function::cuGraphExecKernelNodeSetParams_v2);
    let before = sets();
    // Twice as many as there is room for, of one kernel with four graphs.
    for at in 0..16 {
        ordered.expect(at);
    }
    assert_eq!(sets(), before + 4, "who comes later has no place");
    // The newest goes first, and those that come in turn are still expected.
    let ticket = ordered.launch(30);
    ordered.finish(ticket, 30);
    for at in 0..3 {
        let ticket = ordered.launch(at);
        ordered.finish(ticket, at);
    }
    assert_eq!(sets(), before + 5);

    for at in 0..16 {
        ordered.expect(at);
    }
    let before = bed.report();
    bed.stub.hold_kernels(Some(Whose::Any));
    let tickets: Vec<_> = (30..35).map(|at| ordered.launch(at)).collect();
    assert_eq!(ways(&bed, &before), [4, 1]);
    bed.stub.hold_kernels(None);
    for ticket in tickets {
        assert_eq!(ordered.gathering.outcome(ticket), Moved { copied: 1, masked: 0 });
    }
    ordered.expect(1);
    let Gathering { launcher, variants, .. } = &mut gathering;
    launcher.expect_nothing();
    let held: Vec<_> = (0..5).map(|_| variants.hold_graph(GATHER)).collect();
    assert_eq!(held.iter().flatten().count(), 4, "all of them are free");
}

#[test]
fn a_device_that_fails_while_a_launch_is_prepared_for_is_noticed() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    let mut ordered = Ordered::of(&bed, &mut gathering);
    let set = Function::cuGraphExecKernelNodeSetParams_v2;
    bed.stub.arm(set, no_memory());
    ordered.expect(1);
    let ticket = ordered.launch(1);
    ordered.finish(ticket, 1);
    bed.stub.arm(set, Fault::next(Act::Answer(CUresult(719))));
    let fault = ordered.with(1, |launcher, launch| launcher.expect(launch)).unwrap_err();
    assert!(fault.0.contains("CUDA_ERROR_LAUNCH_FAILED"), "{fault}");
}
