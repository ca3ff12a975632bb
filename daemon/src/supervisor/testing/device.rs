//! A scripted device, for tests: it answers as a device process would, and remembers what it was asked.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use statecopy_kernels::device::{DeviceDescription, Moved};
use statecopy_kernels::plan;
use statecopy_kernels::signature::{DeviceUuid, Signature};
use statecopy_proto::{BindingId, DataType, PlanKind, Refusal, RefusalCode, SignatureHash};
use tokio::sync::{mpsc, oneshot, watch};

use crate::counters::Counters;
use crate::record::{
    DeviceInspection, Progress, PublishedBinding, RegistrationRecord, SlotRecord, Stage,
};
use crate::supervisor::device::{
    Answer, BrokenRings, Command, Copy, DeviceChannels, DeviceHandle, DeviceState,
};

/// The UUID of every scripted device.
pub(crate) const UUID: DeviceUuid = DeviceUuid([7; 16]);

/// What the next request of its kind is answered with.
#[derive(Debug, Default)]
pub(crate) struct Script {
    /// What was asked, by name, in order.
    pub(crate) asked: Vec<String>,
    /// The copies, as they came.
    pub(crate) copies: Vec<Copy>,
    /// The slots that were armed.
    pub(crate) armed: Vec<SlotRecord>,
    /// Refuse the next registration.
    pub(crate) refuse_registration: Option<Refusal>,
    /// Refuse the next copies, and slots of graphs.
    pub(crate) refuse_copies: VecDeque<Refusal>,
    /// Hold registrations and copies until told.
    pub(crate) held: bool,
    waiting: Vec<Waiting>,
}

#[derive(Debug)]
enum Waiting {
    Copy(Answer<Moved>),
    Register(RegistrationRecord, Answer<Vec<PublishedBinding>>),
}

/// The test's side of a scripted device.
#[derive(Debug)]
pub(crate) struct ScriptedDevice {
    pub(crate) handle: DeviceHandle,
    pub(crate) script: Arc<Mutex<Script>>,
    pub(crate) state: watch::Sender<DeviceState>,
    pub(crate) process: watch::Sender<Option<Arc<OwnedFd>>>,
    pub(crate) broken_rings: BrokenRings,
    commands: Option<mpsc::Receiver<Command>>,
}

/// A device that nobody answers for yet.
pub(crate) fn scripted_device() -> ScriptedDevice {
    let description = DeviceDescription {
        kind: "host",
        uuid: UUID,
        name: "scripted".to_owned(),
        family: Some("test".to_owned()),
        fused: vec![DataType::Float32],
    };
    let (_memory, counters) = Counters::create().unwrap();
    let state = DeviceState { pid: 77, ready: true, ..DeviceState::default() };
    let (handle, channels) = DeviceHandle::new(Arc::new(description), Arc::new(counters), state);
    let DeviceChannels { state, process, broken_rings, commands } = channels;
    process.send_replace(Some(Arc::new(statecopy_descriptors::open_pidfd_self().unwrap())));
    let commands = Some(commands);
    ScriptedDevice { handle, script: Arc::default(), state, process, broken_rings, commands }
}

impl ScriptedDevice {
    /// The task that answers; it ends with the last handle or a shutdown.
    pub(crate) fn run(&mut self) -> impl Future<Output = ()> + Send + 'static {
        let mut commands = self.commands.take().unwrap();
        let script = Arc::clone(&self.script);
        async move {
            while let Some(command) = commands.recv().await {
                let last = matches!(command, Command::Shutdown(_));
                let progress = match &command {
                    Command::Register(_, _, progress, _) => Some(progress.clone()),
                    _ => None,
                };
                if let Some(progress) = progress {
                    let step =
                        Progress { stage: Stage::Preparing, layers_done: 1, layers_total: 1 };
                    let _ = progress.send(step).await;
                }
                answer(&mut script.lock().unwrap(), command);
                if last {
                    return;
                }
            }
        }
    }

    /// Answers what was held, and holds nothing more.
    pub(crate) fn release(&self) {
        let mut script = self.script.lock().unwrap();
        script.held = false;
        for waiting in std::mem::take(&mut script.waiting) {
            match waiting {
                Waiting::Copy(answer) => drop(answer.send(Ok(moved()))),
                Waiting::Register(record, answer) => drop(answer.send(Ok(publish(&record)))),
            }
        }
    }

    /// What was asked so far, by name.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.script.lock().unwrap().asked.clone()
    }
}

fn moved() -> Moved {
    Moved { copied: 2, masked: 1 }
}

fn answer(script: &mut Script, command: Command) {
    fn done<T>(script: &mut Script, what: &str, answer: oneshot::Sender<T>, value: T) {
        script.asked.push(what.to_owned());
        drop(answer.send(value));
    }
    match command {
        Command::OpenSession(_, _, answer) => done(script, "open", answer, Ok(())),
        Command::Drain(answer) => done(script, "drain", answer, Ok(())),
        Command::ImportRegion(_, _, answer) => done(script, "import", answer, Ok(())),
        Command::DropRegion(_, _, answer) => done(script, "drop", answer, Ok(())),
        Command::Rebind(_, _, answer) => done(script, "rebind", answer, Ok(())),
        Command::ReleaseLayers(_, answer) => done(script, "release", answer, Ok(())),
        Command::ArmGraph(_, slot, answer) => {
            let outcome = script.refuse_copies.pop_front().map_or(Ok(()), Err);
            if outcome.is_ok() {
                script.armed.push(slot);
            }
            done(script, "arm", answer, outcome);
        }
        Command::DisarmGraph(_, _, answer) => done(script, "disarm", answer, Ok(())),
        Command::CloseSession(_, answer) => done(script, "close", answer, Ok(())),
        Command::Inspect(answer) => {
            done(script, "inspect", answer, Ok(DeviceInspection::default()));
        }
        Command::Shutdown(answer) => done(script, "shutdown", answer, Ok(())),
        Command::Register(_, record, _, answer) => {
            if script.held {
                script.asked.push("register".to_owned());
                script.waiting.push(Waiting::Register(record, answer));
                return;
            }
            let outcome =
                script.refuse_registration.take().map_or_else(|| Ok(publish(&record)), Err);
            done(script, "register", answer, outcome);
        }
        Command::Copy(copy, answer) => {
            script.copies.push(*copy);
            if script.held {
                script.asked.push("copy".to_owned());
                script.waiting.push(Waiting::Copy(answer));
                return;
            }
            let outcome = script.refuse_copies.pop_front().map_or_else(|| Ok(moved()), Err);
            done(script, "copy", answer, outcome);
        }
    }
}

fn publish(record: &RegistrationRecord) -> Vec<PublishedBinding> {
    let layers = record.layers.iter().map(|layer| {
        let layout = layer.placement.layout();
        let plan = plan::choose(&[DataType::Float32], layout);
        let signature = Signature::new(UUID, layout.clone(), layer.placement.offset()).hash();
        PublishedBinding { binding: layer.binding, signature, plan }
    });
    let published: Vec<PublishedBinding> = layers.collect();
    let of = |binding: BindingId| published.iter().find(|layer| layer.binding == binding);
    let sets = record.sets.iter().map(|set| {
        let first = set.layers.first().copied().and_then(of);
        PublishedBinding {
            binding: set.binding,
            signature: first.map_or(SignatureHash(0), |layer| layer.signature),
            plan: first.map_or(PlanKind::ByteCopy, |layer| layer.plan),
        }
    });
    let sets: Vec<PublishedBinding> = sets.collect();
    published.into_iter().chain(sets).collect()
}

/// A refusal for scripts.
pub(crate) fn refusal(code: RefusalCode) -> Refusal {
    Refusal::new(code, "The script says so")
}
