//! A device process for the keeper's tests: this program again, which plays one by a script and writes down what it is asked.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use statecopy_descriptors::{Connection, MESSAGE_BYTES_MAX};
use statecopy_kernels::device::{DeviceDescription, Footprint};
use statecopy_proto::SessionId;

use crate::config::SelfProgram;
use crate::link::{self, Reply, Request};
use crate::supervisor::testing::UUID;

/// It dies when the first process is asked to close it.
pub(super) const DIES_ONCE: SessionId = SessionId(1);
/// It dies when the first and the second process are asked to close it.
pub(super) const DIES_TWICE: SessionId = SessionId(2);
/// It never answers when it is to serve its ring after another.
pub(super) const NEVER_RESUMED: SessionId = SessionId(3);
/// The second process, told to serve its ring after another, answers nonsense, and does not hear that its link closes.
pub(super) const WEDGES: SessionId = SessionId(5);
/// Nothing is special about it.
pub(super) const PLAIN: SessionId = SessionId(4);

/// Written by a test: whoever starts next is ready only once [`GO`] is written.
pub(super) const HOLD: &str = "hold";
pub(super) const GO: &str = "go";

/// Written by a process that wedges, with its number.
pub(super) const WEDGED: &str = "wedged";
/// Longer than any test waits.
const WEDGED_FOR: Duration = Duration::from_secs(30);

/// Among the arguments: this run of the program is a device process.
const MARK: &str = "plays-a-device-process";

/// How the keeper starts it.
pub(super) fn program() -> SelfProgram {
    let test =
        "supervisor::keeper::tests::device_process::plays_its_part_when_it_is_started_as_one";
    let arguments = ["--exact", test, "--nocapture", MARK];
    SelfProgram { arguments: arguments.map(str::to_owned).to_vec() }
}

/// What was written, line by line. The file travels as the lock of the runtime directory, which every device process gets.
pub(super) fn written(file: &impl AsRawFd) -> Vec<String> {
    // Not through the descriptor itself: its offset is where all of them write.
    let text = fs::read_to_string(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    text.lines().map(str::to_owned).collect()
}

fn count(file: &File, line: &str) -> usize {
    written(file).iter().filter(|written| *written == line).count()
}

#[test]
fn plays_its_part_when_it_is_started_as_one() {
    if std::env::args().any(|argument| argument == MARK) {
        let link = io::stdin().as_fd().try_clone_to_owned().unwrap();
        play(&Connection::from_fd(link).unwrap());
    }
}

/// Until the link closes, or it is asked to end.
fn play(link: &Connection) {
    let mut file = None;
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    while let Ok(received) = link.receive(&mut bytes, 8) {
        let message = link::decode::<Request>(&bytes[..received.bytes]).unwrap();
        if let Request::Start(_) = message.body {
            file = received.descriptors.into_iter().next_back().map(|lock: OwnedFd| lock.into());
        }
        let file: &mut File = file.as_mut().unwrap();
        let ended = matches!(message.body, Request::Shutdown);
        if let Some(reply) = answer(file, &message.body) {
            let wedged = matches!(reply, Reply::Taken);
            link.send(&link::encode(message.id, reply).unwrap(), &[]).unwrap();
            if wedged {
                std::thread::sleep(WEDGED_FOR);
            }
        }
        if ended {
            return;
        }
    }
}

fn answer(file: &mut File, request: &Request) -> Option<Reply> {
    match request {
        Request::Start(_) => {
            writeln!(file, "start").unwrap();
            while count(file, HOLD) > count(file, GO) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Some(ready())
        }
        Request::OpenSession { session, resumed, .. } => {
            let how = if *resumed { "resume" } else { "open" };
            writeln!(file, "{how} {session}").unwrap();
            match *session {
                NEVER_RESUMED if *resumed => None,
                WEDGES if *resumed && count(file, "start") == 2 => {
                    writeln!(file, "{WEDGED} {}", std::process::id()).unwrap();
                    // Nothing more is to come: an answer out of turn.
                    Some(Reply::Taken)
                }
                _ => Some(Reply::Done),
            }
        }
        Request::CloseSession { session } => {
            writeln!(file, "close {session}").unwrap();
            let deaths = match *session {
                DIES_ONCE => 1,
                DIES_TWICE => 2,
                _ => 0,
            };
            if count(file, "start") <= deaths {
                std::process::abort();
            }
            Some(Reply::Done)
        }
        _ => Some(Reply::Done),
    }
}

fn ready() -> Reply {
    let description = DeviceDescription {
        kind: "host",
        uuid: UUID,
        name: "played".to_owned(),
        family: None,
        fused: Vec::new(),
    };
    Reply::Ready { description: (&description).into(), footprint: Footprint::default().into() }
}
