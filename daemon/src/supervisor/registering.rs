//! One registration: prepare, seal and publish all layers of a session, or none.
//!
//! It runs in a task of its own. A client that goes away does not stop it: it ends with everything published, or with
//! nothing.

use std::sync::Arc;

use statecopy_kernels::signature::DeviceUuid;
use statecopy_proto::{Refusal, RefusalCode, v1};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::control::Control;
use super::message;
use super::registration::Ground;
use super::services::Method;
use super::sessions::{Grant, Publication};
use crate::record::{Progress, RegistrationRecord};

/// One item of a registration's stream.
pub(crate) type EventItem = Result<v1::RegisterLayersEvent, Status>;

/// Items that the stream holds. Progress that does not fit is left out; the last item has its place.
const ITEMS_HELD: usize = 16;
/// Progress that the device process may be ahead of us.
const PROGRESS_HELD: usize = 64;

/// A registration that is about to run in its session's turn.
#[derive(Debug)]
pub(crate) struct Registering {
    pub(crate) control: Arc<Control>,
    pub(crate) grant: Grant,
    /// When it is withdrawn if it still runs.
    pub(crate) deadline: Instant,
    /// Its place among the requests, and its session's turn: given back at its end.
    pub(crate) permits: (OwnedSemaphorePermit, OwnedSemaphorePermit),
}

impl Registering {
    /// Starts it. The stream carries progress, and `published` or the refusal as its last item.
    pub(crate) fn start(self, request: v1::RegisterLayersRequest) -> ReceiverStream<EventItem> {
        let (items, stream) = mpsc::channel(ITEMS_HELD);
        let tasks = self.control.tasks.clone();
        tasks.spawn(async move {
            // The channel is new: the last item's place is there at once, unless the client is gone already.
            let last = items.clone().reserve_owned().await;
            let item = match self.run(request, &items).await {
                Ok(all) => Ok(message::published(self.control.incarnation, &all)),
                Err(refusal) => {
                    self.control.refused(Method::RegisterLayers.label(), &refusal);
                    Err(refusal.to_status())
                }
            };
            if let Ok(last) = last {
                last.send(item);
            }
            drop(self.permits);
        });
        ReceiverStream::new(stream)
    }

    async fn run(
        &self,
        request: v1::RegisterLayersRequest,
        items: &mpsc::Sender<EventItem>,
    ) -> Result<Arc<Publication>, Refusal> {
        let (sessions, id) = (&self.control.sessions, self.grant.id);
        sessions.begin_registration(id)?;
        match self.publish(request, items).await {
            Ok(all) => {
                let all = Arc::new(all);
                sessions.publish(id, Arc::clone(&all))?;
                tracing::info!(session = id.0, layers = all.layers.len(), "layers published");
                Ok(all)
            }
            Err(refusal) => {
                if let Err(unreleased) = self.grant.device.release_layers(id).await {
                    tracing::warn!(session = id.0, %unreleased, "layers were not withdrawn");
                }
                // A session that ended meanwhile has no state to change.
                let _ = sessions.fail_registration(id);
                Err(refusal)
            }
        }
    }

    async fn publish(
        &self,
        request: v1::RegisterLayersRequest,
        items: &mpsc::Sender<EventItem>,
    ) -> Result<Publication, Refusal> {
        let registration = self.parse(request).await?;
        let (progress, mut reported) = mpsc::channel::<Progress>(PROGRESS_HELD);
        let device = &self.grant.device;
        let register = device.register(self.grant.id, registration.clone(), progress);
        let register = tokio::time::timeout_at(self.deadline, register);
        tokio::pin!(register);
        // A client that does not read loses progress, and nothing else.
        let pass_on = |progress| {
            let _ = items.try_send(Ok(message::progress(self.control.incarnation, progress)));
        };
        let published = loop {
            tokio::select! {
                answer = &mut register => break answer,
                Some(progress) = reported.recv() => pass_on(progress),
            }
        };
        while let Ok(progress) = reported.try_recv() {
            pass_on(progress);
        }
        let published = published.map_err(|_| {
            let sentence = "The registration did not end within its deadline and is withdrawn";
            Refusal::new(RefusalCode::DeadlineExceeded, sentence)
        })??;
        Publication::join(registration, &published).ok_or_else(|| {
            let sentence = "The device process did not answer for every layer";
            Refusal::new(RefusalCode::PrepareFailed, sentence)
        })
    }

    /// Checks the request away from the threads that serve: many layers are many comparisons.
    async fn parse(
        &self,
        request: v1::RegisterLayersRequest,
    ) -> Result<RegistrationRecord, Refusal> {
        let control = Arc::clone(&self.control);
        let regions = control.sessions.regions(self.grant.id)?;
        let device: DeviceUuid = self.grant.device.description().uuid;
        let parse = move || {
            let limits = &control.settings.limits;
            let count = request.layers.len().saturating_add(request.sets.len()) as u64;
            let bindings = control.sessions.next_bindings(count);
            Ground { device, regions: &regions, limits }.parse(
                request.layers,
                request.sets,
                bindings,
            )
        };
        tokio::task::spawn_blocking(parse).await.unwrap_or_else(|_| {
            let sentence = "The check of the registration ended without an answer";
            Err(Refusal::new(RefusalCode::Unavailable, sentence))
        })
    }
}
