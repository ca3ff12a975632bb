use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use statecopy_descriptors::{Doorbell, has_exited};
use statecopy_proto::{Incarnation, SessionId};
use statecopy_session::{Identity, Parameters, SessionMemory};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::config::{DeviceName, Settings};
use crate::record::RingRecord;
use crate::supervisor::device::DeviceHandle;
use crate::supervisor::testing::eventually;

use self::device_process::{DIES_ONCE, DIES_TWICE, GO, HOLD, NEVER_RESUMED, PLAIN, WEDGED, WEDGES};

mod device_process;

/// A keeper of device processes that are played.
struct Rig {
    handle: DeviceHandle,
    keeper: JoinHandle<()>,
    file: File,
}

impl Rig {
    async fn start() -> Self {
        let file = tempfile::tempfile().unwrap();
        let lock = Arc::new(OwnedFd::from(file.try_clone().unwrap()));
        let settings = Settings::default().device(DeviceName::Host);
        let (waiting, _) = watch::channel(Arc::default());
        let incarnation = Incarnation::new([1; 16]);
        let program = device_process::program();
        let (handle, keeper) =
            super::start(settings, incarnation, lock, program, waiting).await.unwrap();
        Self { handle, keeper, file }
    }

    async fn open(&self, session: SessionId) {
        let parameters = Parameters::for_rows(8, 64).unwrap();
        let identity = Identity { incarnation: Incarnation::new([1; 16]), session };
        let (memory, _) = SessionMemory::create(parameters, identity).unwrap();
        let memory = Arc::new(memory.try_clone_fd().unwrap());
        let executor_bell = Arc::new(Doorbell::create().unwrap().try_clone_fd().unwrap());
        let ring = RingRecord { parameters, memory, executor_bell };
        self.handle.open_session(session, ring).await.unwrap();
    }

    /// What every device process was asked so far.
    fn asked(&self) -> Vec<String> {
        device_process::written(&self.file)
    }

    async fn eventually_asked(&self, line: &str, times: usize) {
        eventually(line, || async {
            let asked = self.asked();
            (asked.iter().filter(|asked| *asked == line).count() == times).then_some(())
        })
        .await;
    }

    /// Has the device process of now die, and waits for nothing.
    fn kill(&self) {
        let pid = self.handle.state().borrow().pid;
        kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
    }

    async fn restarted(&self, times: u64) {
        let mut state = self.handle.state();
        eventually("a restart", || {
            let state = state.borrow_and_update();
            std::future::ready((state.ready && state.restarts == times).then_some(()))
        })
        .await;
    }

    async fn end(self) {
        self.handle.shutdown().await.unwrap();
        self.keeper.await.unwrap();
    }
}

#[tokio::test]
async fn a_session_that_is_being_closed_is_not_served_again_by_the_next_device_process() {
    let rig = Rig::start().await;
    rig.open(DIES_ONCE).await;
    rig.open(PLAIN).await;
    rig.handle.close_session(DIES_ONCE).await.unwrap();
    let asked = rig.asked();
    assert!(asked.contains(&format!("resume {PLAIN}")), "{asked:?}");
    assert!(!asked.contains(&format!("resume {DIES_ONCE}")), "{asked:?}");
    rig.end().await;
}

#[tokio::test]
async fn a_session_that_ends_while_the_next_device_process_starts_is_not_served_by_it() {
    let mut rig = Rig::start().await;
    rig.open(PLAIN).await;
    writeln!(rig.file, "{HOLD}").unwrap();
    rig.kill();
    rig.eventually_asked("start", 2).await;
    let handle = rig.handle.clone();
    let closing = tokio::spawn(async move { handle.close_session(PLAIN).await });
    // The keeper has it before the process goes on.
    tokio::task::yield_now().await;
    writeln!(rig.file, "{GO}").unwrap();
    closing.await.unwrap().unwrap();
    let asked = rig.asked();
    assert!(!asked.contains(&format!("resume {PLAIN}")), "{asked:?}");
    rig.end().await;
}

#[tokio::test]
async fn a_session_is_closed_for_good_though_the_device_process_dies_twice_under_it() {
    let rig = Rig::start().await;
    rig.open(DIES_TWICE).await;
    rig.handle.close_session(DIES_TWICE).await.unwrap();
    rig.kill();
    rig.restarted(3).await;
    let asked = rig.asked();
    assert_eq!(asked.iter().filter(|asked| *asked == "start").count(), 4, "{asked:?}");
    assert!(!asked.contains(&format!("resume {DIES_TWICE}")), "{asked:?}");
    rig.end().await;
}

#[tokio::test]
async fn a_worker_can_know_of_the_next_device_process_before_it_serves_a_ring() {
    let rig = Rig::start().await;
    rig.open(NEVER_RESUMED).await;
    let first = rig.handle.process().borrow().clone().unwrap();
    rig.kill();
    rig.eventually_asked(&format!("resume {NEVER_RESUMED}"), 1).await;
    let next = rig.handle.process().borrow().clone().expect("a process may run copies");
    assert!(has_exited(first).unwrap());
    assert!(!has_exited(next).unwrap());
    assert!(!rig.handle.state().borrow().ready);
    rig.end().await;
}

#[tokio::test]
async fn a_device_process_that_fails_to_take_over_is_ended_and_another_takes_over() {
    let rig = Rig::start().await;
    rig.open(WEDGES).await;
    rig.kill();
    rig.eventually_asked(&format!("resume {WEDGES}"), 2).await;
    let asked = rig.asked();
    let wedged = asked.iter().find_map(|line| line.strip_prefix(WEDGED)?.trim().parse().ok());
    let wedged = Pid::from_raw(wedged.unwrap()).unwrap();
    assert!(test_kill_process(wedged).is_err(), "it lives");
    rig.restarted(1).await;
    rig.end().await;
}
