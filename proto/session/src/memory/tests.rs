use statecopy_proto::{BindingId, Direction, IndexWidth, Lane, RegionId, SignatureHash};

use super::*;
use crate::answer::{Answer, Moved};
use crate::clock::MonotonicNs;
use crate::descriptor::{CopyRequest, FlagSource, IndexSource, Indices, Packed};
use crate::submitter::{PollError, Progress};

fn identity() -> Identity {
    Identity { incarnation: Incarnation::new([7; 16]), session: SessionId(11) }
}

fn parameters(slots: u32, inline_bytes: u32) -> Parameters {
    Parameters::new(slots, inline_bytes).unwrap()
}

/// A request with inline INT32 indices and inline flags.
fn request(selected: u64) -> CopyRequest {
    CopyRequest {
        session: SessionId(11),
        binding: BindingId(5),
        signature: SignatureHash(0xfeed),
        direction: Direction::Gather,
        selected,
        packed: Packed { region: RegionId(3), offset: 4096, bytes: 64 * selected, dtype: 1 },
        indices: Indices { width: IndexWidth::Int32, source: IndexSource::Inline },
        flags: FlagSource::Inline,
        lane: Lane(0),
        deadline: MonotonicNs::NEVER,
        submitted_at: MonotonicNs(1),
    }
}

/// Both ends of a fresh memory, and the doorbells: the executor's, the submitter's.
fn ends(parameters: Parameters) -> (SealedMemory, Submitter, Executor, Doorbell, Doorbell) {
    let (sealed, memory) = SessionMemory::create(parameters, identity()).unwrap();
    let peer = SessionMemory::open(sealed.try_clone_fd().unwrap()).unwrap();
    let executor_bell = Doorbell::create().unwrap();
    let submitter_bell = Doorbell::create().unwrap();
    let submitter = peer.submitter(executor_bell.try_clone().unwrap());
    let executor = memory.executor(submitter_bell.try_clone().unwrap());
    (sealed, submitter, executor, executor_bell, submitter_bell)
}

fn moved(rows_copied: u64) -> Answer {
    Answer { result: Ok(Moved { rows_copied, rows_masked: 1 }), executor_ns: 9 }
}

#[test]
fn a_request_reaches_the_executor_whole_and_its_answer_comes_back() {
    let (_sealed, mut submitter, mut executor, ..) = ends(parameters(4, 4096));
    let request = request(3);
    let indices = [1_u8, 0, 0, 0, 2, 0, 0, 0, 255, 255, 255, 255];
    let sequence = submitter.try_submit(&request, &indices, &[1, 0, 2]).unwrap();
    assert_eq!(submitter.poll(sequence), Ok(Progress::Pending));

    let taken = executor.take().unwrap().unwrap();
    assert_eq!(taken.sequence, sequence);
    assert_eq!(taken.descriptor.parse(), Ok(request));
    let ranges = request.inline_ranges(4096).unwrap();
    assert_eq!((ranges.indices, ranges.flags), (Some(0..12), Some(16..19)));
    let (mut seen, mut flags) = ([0; 12], [0; 3]);
    executor.copy_inline(sequence, 0, &mut seen);
    executor.copy_inline(sequence, 16, &mut flags);
    assert_eq!((seen, flags), (indices, [1, 0, 2]));
    assert_eq!(executor.take(), Ok(None));

    executor.accept(sequence);
    assert_eq!(submitter.poll(sequence), Ok(Progress::Accepted));
    executor.answer(sequence, &moved(2));
    assert_eq!(submitter.poll(sequence), Ok(Progress::Answered(moved(2))));
    assert_eq!(submitter.poll(sequence), Err(PollError::NotOutstanding(sequence.get())));
    assert_eq!((submitter.outstanding(), executor.outstanding()), (0, 0));
}
