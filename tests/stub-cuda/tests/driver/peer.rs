//! Another process with the driver: this very program once more, told line by line what to do.

use std::env;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Lines, Write as _, stdin};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use statecopy_kernels::cuda::arguments::Arguments;
use statecopy_stub_cuda::{CUresult, Stub};

use crate::calls::{Answer, Driver, Handle, out};
use crate::compiler::compile;

/// Set for a process that is a peer.
const ROLE: &str = "STUB_CUDA_TEST_PEER";
/// What begins an answer, among the words of the test runner.
const ANSWER: &str = "answer: ";

/// The other process. Dropped, it is killed.
pub(crate) struct Peer {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    /// With nothing but its environment to find the stub by.
    pub(crate) fn start(stub: &Stub) -> Self {
        Self::start_with(stub, None)
    }

    /// One that sees other devices than the rest.
    pub(crate) fn start_with(stub: &Stub, devices: Option<String>) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "peer::does_as_it_is_told", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, "1").envs(stub.environment());
        command.envs(devices.map(|devices| ("STATECOPY_STUB_CUDA_DEVICES", devices)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// One that has begun to use the driver.
    pub(crate) fn open(stub: &Stub) -> Self {
        let mut peer = Self::start(stub);
        assert_eq!(peer.ask("open"), "0");
        peer
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn tell(&mut self, command: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
    }

    /// What it answers.
    pub(crate) fn answer(&mut self) -> String {
        let lines = self.lines.by_ref().map(Result::unwrap);
        let answer = lines.filter_map(|line| Some(line.split_once(ANSWER)?.1.to_owned())).next();
        answer.expect("the peer answers")
    }

    pub(crate) fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer()
    }

    /// Memory of the peer that is full of a value, by its handle.
    pub(crate) fn hold(&mut self, bytes: usize, value: u8) -> Handle {
        parse(&self.ask(&format!("hold {bytes} {value}")))
    }

    /// Opens a handle in the peer, and says what came of it.
    pub(crate) fn take(&mut self, handle: Handle) -> String {
        self.ask(&format!("take {}", text(handle)))
    }

    /// Kills it, as a machine does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let killed = self.child.kill().and_then(|()| self.child.wait());
        assert!(killed.is_ok(), "a child can be killed");
    }
}

fn text(handle: Handle) -> String {
    handle.0.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn parse(text: &str) -> Handle {
    let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    Handle(std::array::from_fn(byte))
}

/// What a peer keeps between two commands.
struct State {
    driver: Driver,
    memory: u64,
}

impl State {
    fn command(&mut self, words: &[&str]) -> Answer<String> {
        let driver = &self.driver;
        match words {
            ["open"] => driver.start()?,
            ["name"] => {
                let mut name = [0_u8; 32];
                driver.cuDeviceGetName(name.as_mut_ptr().cast(), 32, 0)?;
                let end = name.iter().position(|byte| *byte == 0).unwrap();
                return Ok(String::from_utf8(name[..end].to_vec()).unwrap());
            }
            ["hold", bytes, value] => {
                let bytes = bytes.parse().unwrap();
                self.memory = driver.allocate(bytes)?;
                driver.cuMemsetD8_v2(self.memory, value.parse().unwrap(), bytes)?;
                return driver.export(self.memory).map(text);
            }
            ["take", handle] => drop(driver.open_handle(parse(handle))?),
            ["free"] => driver.cuMemFree_v2(self.memory)?,
            ["pieces", count] => {
                let (count, piece) = (count.parse().unwrap(), 2 << 20);
                let at = driver.reserve(count * piece)?;
                for place in 0..count {
                    let handle = driver.create(piece, 1)?;
                    driver.cuMemMap(at + (place * piece) as u64, piece, 0, handle, 0)?;
                    driver.cuMemRelease(handle)?;
                }
                driver.allow(at, count * piece, 3)?;
            }
            ["compile", arch] => return compile(driver, arch),
            ["launch"] => {
                let function = driver.function(driver.load_module()?, "gather_int32")?;
                let stream = driver.stream()?;
                let arguments = Arguments { packed: self.memory, ..Arguments::zeroed() };
                driver.launch(function, stream, &arguments, 1)?;
                driver.cuStreamSynchronize(stream)?;
            }
            ["free-bytes"] => {
                let mut total = 0;
                return out(|at| driver.cuMemGetInfo_v2(at, &raw mut total))
                    .map(|free| free.to_string());
            }
            _ => panic!("no such command: {words:?}"),
        }
        Ok("0".into())
    }
}

/// In a process that is no peer, nothing.
#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the environment says whether this process is a peer"
)]
fn does_as_it_is_told() {
    if env::var_os(ROLE).is_none() {
        return;
    }
    let driver = Driver::named(Path::new("libcuda.so.1"));
    let mut state = State { driver, memory: 0 };
    for line in stdin().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        match state.command(&words) {
            Ok(answer) => println!("{ANSWER}{answer}"),
            Err(CUresult(code)) => println!("{ANSWER}{code}"),
        }
    }
}
