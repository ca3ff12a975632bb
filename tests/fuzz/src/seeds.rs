//! Writes a few inputs for every target into the folder that is given: `seeds CORPORA`.

use std::env::args_os;
use std::fs::{create_dir_all, write};
use std::io::{Error, Result};
use std::path::Path;
use std::sync::Arc;

use statecopy_proto::descriptor_socket::{DaemonRecord, TOKEN_BYTES, Token, WorkerRecord};
use statecopy_proto::{HANDLE_BYTES, HandleKind, Refusal, RefusalCode, RegionId, SessionId};
use statecopy_session::{Answer, Moved, Subject};
use statecopyd::device_process::hostile::input_of_seed;
use statecopyd::link::{Reply, Request, SlotMessage, encode};
use statecopyd::record::{HandleRecord, PieceRecord, RegionRecord, SlotRecord};

fn main() -> Result<()> {
    let Some(corpora) = args_os().nth(1) else {
        return Err(Error::other("usage: seeds CORPORA"));
    };
    let corpora = Path::new(&corpora);
    seed(corpora, "ring", (0..64).map(|seed| input_of_seed(seed, 600)))?;
    seed(corpora, "descriptor", [valid_descriptor(), input_of_seed(1, 132)])?;
    seed(corpora, "records", records())?;
    seed(corpora, "answer", answers())?;
    seed(corpora, "link", messages()?)?;
    seed(corpora, "layout", (0..16).map(|seed| input_of_seed(seed, 160)))
}

fn seed(corpora: &Path, target: &str, inputs: impl IntoIterator<Item = Vec<u8>>) -> Result<()> {
    let folder = corpora.join(target);
    create_dir_all(&folder)?;
    for (number, input) in inputs.into_iter().enumerate() {
        write(folder.join(format!("seed-{number}")), input)?;
    }
    Ok(())
}

/// A gather of one row with inline INT32 indices.
fn valid_descriptor() -> Vec<u8> {
    let mut words = [1, 1, 7, 1, 2, 0, 96, 0, u64::MAX, 0, 0, 0, 0, 1, 0, 0_u64];
    // dtype 1, gather, inline indices of 4 bytes, no flags; lane 0, host-completed.
    words[7] = u64::from_le_bytes([1, 0, 0, 0, 1, 1, 4, 0]);
    words[15] = u64::from_le_bytes([0, 0, 0, 0, 1, 0, 0, 0]);
    let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    bytes.extend(4096_u32.to_le_bytes());
    bytes
}

fn records() -> Vec<Vec<u8>> {
    let refused = DaemonRecord::refused(&Refusal::new(RefusalCode::Overlap, "They overlap"));
    vec![
        WorkerRecord::Attach { token: Token::new([7; TOKEN_BYTES]) }.encode(),
        WorkerRecord::Descriptors { tag: 1, count: 3 }.encode(),
        DaemonRecord::Attached.encode(),
        DaemonRecord::DeviceProcess.encode(),
        DaemonRecord::Received { tag: 1, total: 3 }.encode(),
        DaemonRecord::SessionEnded { sentence: "The worker closed it".to_owned() }.encode(),
        refused.encode(),
    ]
}

fn answers() -> Vec<Vec<u8>> {
    let moved = Answer { result: Ok(Moved { rows_copied: 3, rows_masked: 1 }), executor_ns: 9 };
    let refused = Subject::ALL.map(|it| Answer { result: Err(it.fault(1, 2)), executor_ns: 9 });
    let bytes =
        |answer: &Answer| answer.to_words().into_iter().flat_map(u64::to_le_bytes).collect();
    [moved].iter().chain(&refused).map(bytes).collect()
}

fn messages() -> Result<Vec<Vec<u8>>> {
    let session = SessionId(1);
    let requests = [
        Request::Inspect,
        Request::Drain,
        Request::Shutdown,
        import(session),
        Request::Register {
            session,
            layers: Vec::new(),
            sets: Vec::new(),
            last: true,
            resumed: false,
        },
        Request::Rebind { session, layers: Vec::new(), last: true },
        arm(session)?,
    ];
    let refused = Refusal::new(RefusalCode::Overlap, "They overlap");
    let replies = [
        Reply::Done,
        Reply::Taken,
        Reply::Refused((&refused).into()),
        Reply::RingBroken { session, reason: "it jumped".to_owned() },
    ];
    let requests = requests.into_iter().map(|request| encode(1, request));
    let replies = replies.into_iter().map(|reply| encode(1, reply));
    requests.chain(replies).map(|bytes| bytes.map_err(Error::other)).collect()
}

/// A slot of a graph: a gather of one row with shared INT32 indices.
fn arm(session: SessionId) -> Result<Request> {
    let mut descriptor = [3, 1, 7, 1, 2, 0, 96, 0, u64::MAX, 2, 128, 0, 0, 1, 0, 0_u64];
    // dtype 1, gather, shared indices of 4 bytes, no flags; lane 0, stream-ordered.
    descriptor[7] = u64::from_le_bytes([1, 0, 0, 0, 1, 2, 4, 0]);
    descriptor[15] = u64::from_le_bytes([0, 0, 0, 0, 2, 0, 0, 0]);
    let slot = SlotMessage { pair: 64, descriptor };
    let record = SlotRecord::try_from(slot).map_err(Error::other)?;
    let slots = vec![SlotMessage::from(&record)];
    Ok(Request::ArmGraphs { session, slots, last: true, resumed: false })
}

/// The first part of a region that travels by value.
fn import(session: SessionId) -> Request {
    let piece = |handle| PieceRecord { bytes: 2048, buffer: 7, handle };
    let value = HandleRecord::Value(Box::new([5; HANDLE_BYTES]));
    let region = RegionRecord {
        id: RegionId(2),
        kind: HandleKind::CudaFabric,
        bytes: 4096,
        pieces: Arc::new([piece(value)]),
    };
    let pieces = region.pieces.iter().map(Into::into).collect();
    Request::ImportRegion {
        session,
        region: region.id,
        announced: (&region).into(),
        pieces,
        last: false,
    }
}
