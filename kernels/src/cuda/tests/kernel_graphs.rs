//! Launches by graphs of a kernel: who has one, and what becomes of it.

use std::mem;

use statecopy_stub_cuda::{Act, CUresult, Fault, Function, Whose};

use super::launches::{Gathering, class_of};
use super::*;
use crate::conformance::cache;
use crate::device::{Launcher as _, Moved};

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
