//! Python's plain client on a CUDA device, over the stub driver: the whole way from a DLPack tensor to the device's memory.

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use statecopy_tests::{CudaBed, until};

/// An interpreter, as `tests/run` made it.
const PYTHON: &str = "TEST_PYTHON";
/// The folder that the package lies in.
const PACKAGE: &str = "TEST_PACKAGE";

const CASES: [&str; 10] = [
    "indices and flags of the host go with the request",
    "indices and flags of the device are read where they lie",
    "packed is read where it lies, and no byte beside the rows is written",
    "results go where they are wanted, and may be waited for later",
    "memory that cannot be shared is refused",
    "a tensor of another device is refused",
    "buffers go back to the pool",
    "a layer sleeps, and wakes in other memory",
    "every tensor that was lent was given back",
    "",
];

const STREAM_CASES: [&str; 21] = [
    "a gather returns at once, and comes behind what its stream was asked before",
    "a scatter comes before what its stream is asked after it",
    "streams do not wait for each other",
    "values of the host are there when their turn has come",
    "copies of no rows are copies",
    "a refusal raises, and its stream goes on",
    "results go where they are wanted, and what is submitted is waited for by the host",
    "threads take turns on one stream",
    "streams whose copies are done give their lanes to others",
    "memory is given up once the copies that were put on streams are made",
    "results lie in the pool where the library's own memory cannot be shared",
    "after a freeze what is new is copied in the stream's order",
    "a set of layers is copied by one request, on a stream and in a graph",
    "a captured copy is made at every replay, with the indices of then",
    "a graph that is gone gives back what it had",
    "a buffer of the pool that a graph writes is nobody else's",
    "what is trimmed is kept until the copies that name it are made",
    "a buffer of the pool changes streams in order, and neither the host waits nor a capture ends",
    "what is given up is freed once its stream is past it",
    "a client that is host-completed returns when the bytes are there",
    "a stream that lost a copy to the daemon's end raises until it is reset, and no other does",
];

/// An interpreter that is to run a script of this crate, over the stub driver; `None` where there is none.
fn python(script: &str) -> Option<Command> {
    #[expect(clippy::disallowed_methods, reason = "where tests/run put them")]
    let (python, package) = (env::var_os(PYTHON)?, env::var_os(PACKAGE)?);
    let mut command = Command::new(python);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(script));
    command.env("PYTHONPATH", package);
    Some(command)
}

#[test]
fn copies_of_a_python_worker_are_in_the_order_of_its_streams() {
    let Some(mut command) = python("cuda_streams.py") else {
        println!("skipped: {PYTHON} and {PACKAGE} name no interpreter and package");
        return;
    };
    let bed = CudaBed::default();
    let directory = tempfile::tempdir().expect("a directory");
    let runtime = directory.path().join("run");
    let mut daemon = Some(bed.daemon().runtime(&runtime).start());
    command.env("STATECOPY_ADDR", &runtime).envs(bed.stub.environment());
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut worker = piped.spawn().expect("the interpreter starts");
    let mut answers = worker.stdin.take().expect("a pipe");
    let mut said = Vec::new();
    for line in BufReader::new(worker.stdout.take().expect("a pipe")).lines() {
        let line = line.expect("the worker writes text");
        match line.strip_prefix("! ") {
            None => said.push(line),
            Some("kill") => {
                let mut killed = daemon.take().expect("it lives");
                killed.signal(Signal::KILL);
                killed.wait();
                writeln!(answers, "done").expect("the worker listens");
            }
            Some("start") => {
                daemon = Some(bed.daemon().runtime(&runtime).start());
                writeln!(answers, "done").expect("the worker listens");
            }
            Some(other) => panic!("the worker asks for {other:?}"),
        }
    }
    let mut complained = String::new();
    worker.stderr.take().expect("a pipe").read_to_string(&mut complained).expect("text");
    let ended = worker.wait().expect("it ends");
    let log = daemon.as_ref().map_or_else(String::new, |daemon| daemon.log());
    assert!(ended.success(), "{said:?}\n{complained}\n{log}");
    assert_eq!(said, STREAM_CASES, "{complained}");
}

#[test]
fn a_python_worker_copies_device_memory_and_gives_back_what_it_shared() {
    let Some(mut command) = python("cuda_worker.py") else {
        println!("skipped: {PYTHON} and {PACKAGE} name no interpreter and package");
        return;
    };
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let worked = command
        .env("STATECOPY_ADDR", daemon.runtime())
        .envs(bed.stub.environment())
        .output()
        .expect("the interpreter starts");
    let said = String::from_utf8_lossy(&worked.stdout);
    let complained = String::from_utf8_lossy(&worked.stderr);
    assert!(worked.status.success(), "{said}\n{complained}\n{}", daemon.log());
    assert_eq!(said.split('\n').collect::<Vec<_>>(), CASES, "{complained}");
    until("the session ends with the worker", || daemon.inspect().sessions.is_empty());
}
