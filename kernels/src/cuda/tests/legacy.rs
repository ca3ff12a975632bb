//! Imports of legacy handles, which only another process can offer.

use std::env;
use std::io::{BufRead as _, BufReader, Read as _, Write as _, stdin};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use statecopy_proto::HandleKind;
use statecopy_stub_cuda::{Function, Knob};

use super::*;
use crate::conformance::noise;
use crate::device::{PieceHandle, Region as _};

/// Set for the process that exports.
const EXPORTER: &str = "STATECOPY_TEST_EXPORTER";
/// What its answers begin with, since the test harness writes lines of its own.
const ANSWER: &str = "exported ";

/// Not a test: what the exporting process runs. Line by line: `allocate BYTES FILL`, answered by handle, bytes and buffer; or
/// `free`, of the newest.
#[test]
fn exporting_process() {
    #[expect(clippy::disallowed_methods, reason = "how a process knows that it is the exporter")]
    if env::var_os(EXPORTER).is_none() {
        return;
    }
    let exporter = CudaExporter::open(Path::new(DRIVER_LIBRARY)).unwrap();
    let mut memories = Vec::new();
    for line in stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        if let ["allocate", bytes, fill] = words[..] {
            let (bytes, fill): (u64, u8) = (bytes.parse().unwrap(), fill.parse().unwrap());
            let memory =
                exporter.allocate(CudaSelector::Ordinal(0), bytes, Allocator::Default).unwrap();
            memory.write(0, &vec![fill; usize::try_from(bytes).unwrap()]).unwrap();
            let mut export = exporter.export(memory.address(), bytes).unwrap();
            let piece = export.next_pieces(1).unwrap().remove(0);
            let PieceHandle::Value(handle) = piece.handle else { panic!("no value") };
            let hex: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
            println!("\n{ANSWER}{hex} {} {}", piece.bytes, piece.buffer);
            memories.push(memory);
        } else {
            memories.pop().unwrap();
            println!("\n{ANSWER}");
        }
    }
}

/// The other process.
struct Exporter {
    process: Child,
    asked: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// An allocation that it offers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Offer {
    handle: Vec<u8>,
    bytes: u64,
    buffer: u64,
}

impl Offer {
    fn announced(&self) -> Announced {
        Announced { kind: HandleKind::CudaIpc, bytes: self.bytes, pieces: 1 }
    }

    fn pieces(&self) -> Vec<Piece> {
        let handle = PieceHandle::Value(self.handle.clone().into());
        vec![Piece { bytes: self.bytes, buffer: self.buffer, handle }]
    }
}

impl Exporter {
    fn start(stub: &Stub) -> Self {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "cuda::tests::legacy::exporting_process"])
            .envs(stub.environment())
            .env(EXPORTER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let asked = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().unwrap());
        Self { process, asked, answers }
    }

    fn ask(&mut self, question: &str) -> String {
        writeln!(self.asked.as_mut().unwrap(), "{question}").unwrap();
        let lines = self.answers.by_ref().lines();
        let mut answers =
            lines.filter_map(|line| line.unwrap().strip_prefix(ANSWER).map(str::to_owned));
        answers.next().expect("the exporting process answers")
    }

    fn allocate(&mut self, bytes: u64, fill: u8) -> Offer {
        let answer = self.ask(&format!("allocate {bytes} {fill}"));
        let words: Vec<&str> = answer.split(' ').collect();
        let digits = words[0].as_bytes().chunks(2);
        let handle = digits
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect();
        Offer { handle, bytes: words[1].parse().unwrap(), buffer: words[2].parse().unwrap() }
    }

    fn free(&mut self) {
        self.ask("free");
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        drop(self.asked.take());
        let _ended = self.process.wait();
    }
}

/// A device, and another process over the same stub, which ends before the stub goes.
fn open() -> (Bed, Exporter) {
    let stub = Stub::create().unwrap();
    let exporter = Exporter::start(&stub);
    (Bed::over(stub), exporter)
}

fn first_byte(region: &CudaRegion) -> u8 {
    let mut byte = [0];
    region.read(region.bytes() - 1, &mut byte).unwrap();
    byte[0]
}

#[test]
fn an_allocation_is_mapped_once_and_goes_with_its_last_region() {
    let (bed, mut exporter) = open();
    let offer = exporter.allocate(3 << 20, 7);
    let held = bed.held();
    let import = || bed.import(offer.announced(), offer.pieces()).unwrap();
    let (one, two, three) = (import(), import(), import());
    assert_eq!((one.bytes(), first_byte(&one), first_byte(&three)), (3 << 20, 7, 7));
    assert_eq!(one.allocation(), two.allocation());
    let calls = |function| bed.report().count(function);
    assert_eq!(calls(Function::cuIpcOpenMemHandle_v2), 1);
    drop((one, three));
    assert_eq!(calls(Function::cuIpcCloseMemHandle), 0);
    assert_eq!(first_byte(&two), 7);
    drop(two);
    assert_eq!(calls(Function::cuIpcCloseMemHandle), 1);
    assert_eq!(bed.held(), held);
    assert_eq!(first_byte(&import()), 7);
}

#[test]
fn two_allocations_are_two() {
    let (bed, mut exporter) = open();
    let offers = [exporter.allocate(4096, 1), exporter.allocate(4096, 2)];
    let regions = offers.map(|offer| bed.import(offer.announced(), offer.pieces()).unwrap());
    assert_ne!(regions[0].allocation(), regions[1].allocation());
    assert_eq!(regions.each_ref().map(first_byte), [1, 2]);
}

#[test]
fn a_handle_that_comes_back_for_another_allocation_is_noticed() {
    let (bed, mut exporter) = open();
    bed.stub.set(Knob::ReuseHandles, true);
    // Once of the same size, when only the buffer tells, and once of another.
    for (before, after) in [(4096, 4096), (4096, 8192)] {
        let old = exporter.allocate(before, 1);
        let region = bed.import(old.announced(), old.pieces()).unwrap();
        exporter.free();
        let new = exporter.allocate(after, 2);
        assert_eq!(new.handle, old.handle);
        assert_ne!(new.buffer, old.buffer);
        let refusal = bed.refused(new.announced(), new.pieces());
        assert_eq!(refusal.code(), RefusalCode::HandleInvalid);
        assert!(refusal.sentence().contains("comes back for another allocation"), "{refusal}");
        assert!(refusal.remedy().contains("Release"), "{refusal}");
        assert_eq!(first_byte(&region), 1, "the old one is as it was");
        drop(region);
        let region = bed.import(new.announced(), new.pieces()).unwrap();
        assert_eq!((first_byte(&region), region.bytes()), (2, after));
        drop(region);
        exporter.free();
    }
}

#[test]
fn what_a_handle_leads_to_is_as_large_as_announced() {
    let (bed, mut exporter) = open();
    let offer = exporter.allocate(8192, 1);
    for bytes in [1, 4096, 8191, 8193, 1 << 40] {
        let wrong = Offer { bytes, ..offer.clone() };
        let refusal = bed.refused(wrong.announced(), wrong.pieces());
        assert_eq!(refusal.code(), RefusalCode::HandleInvalid, "{refusal}");
        // A piece of another size than its region.
        let refusal = bed.refused(wrong.announced(), offer.pieces());
        assert_eq!(refusal.code(), RefusalCode::HandleInvalid, "{refusal}");
    }
    let mut twice = offer.announced();
    twice.pieces = 2;
    bed.refused(twice, offer.pieces());
    let mut two = offer.pieces();
    two.extend(offer.pieces());
    bed.refused(offer.announced(), two);
    bed.refused(offer.announced(), Vec::new());
    bed.import(offer.announced(), offer.pieces()).unwrap();
}

#[test]
fn handles_of_freed_memory_or_of_random_bytes_are_refused() {
    let (bed, mut exporter) = open();
    let offer = exporter.allocate(4096, 1);
    let refused = |handle: Vec<u8>| {
        let wrong = Offer { handle, ..offer.clone() };
        let refusal = bed.refused(wrong.announced(), wrong.pieces());
        assert_eq!(refusal.code(), RefusalCode::HandleInvalid, "{refusal}");
    };
    for length in [0, 1, 32, 63, 65, 128] {
        let mut handle = offer.handle.clone();
        handle.resize(length, 0);
        refused(handle);
    }
    for seed in 1..50 {
        refused(noise(64, seed));
    }
    for at in 0..64 {
        let mut handle = offer.handle.clone();
        handle[at] ^= 0x10;
        refused(handle);
    }
    exporter.free();
    refused(offer.handle.clone());
}

#[test]
fn a_handle_of_a_process_of_the_same_number_is_told_apart() {
    let bed = Bed::open();
    let memory = bed.allocate(4096, Allocator::Default);
    let (announced, pieces) = bed.export(&memory);
    let refusal = bed.refused(announced, pieces);
    assert_eq!(refusal.code(), RefusalCode::HandleInvalid);
    assert_eq!(refusal.subject(), SAME_PROCESS_SUBJECT);
}
