//! RegisterRegion, ReleaseRegion, RegisterLayers, Rebind, ReleaseLayers, ArmGraph, DisarmGraph.
//!
//! Each works in its session's turn and comes to its end whatever becomes of the caller, so that supervisor and device
//! process always agree on what a session owns.

use std::sync::Arc;

use statecopy_proto::v1::registry_service_server::RegistryService;
use statecopy_proto::{Refusal, RefusalCode, RegionId, v1};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::{Deadline, Method, Services, goes_on, turn};
use crate::record::RegionRecord;
use crate::supervisor::control::Control;
use crate::supervisor::copy_request::{parse_pair, parse_slot};
use crate::supervisor::offered::{Offered, Terms};
use crate::supervisor::registering::{self, Registering};
use crate::supervisor::registration::Ground;
use crate::supervisor::sessions::Grant;

/// A session's turn to change what it owns, with what it was granted on.
struct Work {
    control: Arc<Control>,
    grant: Grant,
    deadline: Deadline,
    /// A place among the requests that wait or run.
    _admitted: OwnedSemaphorePermit,
}

#[tonic::async_trait]
impl RegistryService for Services {
    async fn register_region(
        &self,
        request: Request<v1::RegisterRegionRequest>,
    ) -> Result<Response<v1::RegisterRegionReply>, Status> {
        self.answer(Method::RegisterRegion, async {
            let default_ms = self.control.settings.default_deadline_ms;
            let (work, request) =
                self.work(request, default_ms, |request| request.session.take())?;
            let region = self.register(work, request).await?;
            let incarnation = self.control.incarnation.to_vec();
            Ok(v1::RegisterRegionReply { incarnation, region_id: region.0 })
        })
        .await
    }

    async fn release_region(
        &self,
        request: Request<v1::ReleaseRegionRequest>,
    ) -> Result<Response<v1::ReleaseRegionReply>, Status> {
        self.answer(Method::ReleaseRegion, async {
            let default_ms = self.control.settings.default_deadline_ms;
            let (grant, deadline, request) =
                self.grant(request, default_ms, |request| request.session.take())?;
            let control = Arc::clone(&self.control);
            self.to_the_end(deadline, release_region(control, grant, deadline, request)).await?;
            Ok(v1::ReleaseRegionReply { incarnation: self.control.incarnation.to_vec() })
        })
        .await
    }

    type RegisterLayersStream = ReceiverStream<registering::EventItem>;

    async fn register_layers(
        &self,
        request: Request<v1::RegisterLayersRequest>,
    ) -> Result<Response<Self::RegisterLayersStream>, Status> {
        self.answer(Method::RegisterLayers, async {
            let register_ms = self.control.settings.register_deadline_ms;
            let (work, request) =
                self.work(request, register_ms, |request| request.session.take())?;
            let turn = turn(&work.grant, work.deadline).await?;
            let registering = Registering {
                control: work.control,
                grant: work.grant,
                deadline: work.deadline.instant(),
                permits: (work._admitted, turn),
            };
            Ok(registering.start(request))
        })
        .await
    }

    async fn rebind(
        &self,
        request: Request<v1::RebindRequest>,
    ) -> Result<Response<v1::RebindReply>, Status> {
        self.answer(Method::Rebind, async {
            let default_ms = self.control.settings.default_deadline_ms;
            let (work, request) =
                self.work(request, default_ms, |request| request.session.take())?;
            let deadline = work.deadline;
            self.to_the_end(deadline, rebind(work, request)).await?;
            Ok(v1::RebindReply { incarnation: self.control.incarnation.to_vec() })
        })
        .await
    }

    async fn release_layers(
        &self,
        request: Request<v1::ReleaseLayersRequest>,
    ) -> Result<Response<v1::ReleaseLayersReply>, Status> {
        self.answer(Method::ReleaseLayers, async {
            let default_ms = self.control.settings.default_deadline_ms;
            let (grant, deadline, _) =
                self.grant(request, default_ms, |request| request.session.take())?;
            let control = Arc::clone(&self.control);
            let release = async move {
                let _turn = turn(&grant, deadline).await?;
                control.sessions.withdraw(grant.id)?;
                grant.device.release_layers(grant.id).await
            };
            self.to_the_end(deadline, release).await?;
            Ok(v1::ReleaseLayersReply { incarnation: self.control.incarnation.to_vec() })
        })
        .await
    }

    async fn arm_graph(
        &self,
        request: Request<v1::ArmGraphRequest>,
    ) -> Result<Response<v1::ArmGraphReply>, Status> {
        self.answer(Method::ArmGraph, async {
            let default_ms = self.control.settings.default_deadline_ms;
            let (work, request) =
                self.work(request, default_ms, |request| request.session.take())?;
            let deadline = work.deadline;
            self.to_the_end(deadline, arm_graph(work, request)).await?;
            Ok(v1::ArmGraphReply { incarnation: self.control.incarnation.to_vec() })
        })
        .await
    }

    async fn disarm_graph(
        &self,
        request: Request<v1::DisarmGraphRequest>,
    ) -> Result<Response<v1::DisarmGraphReply>, Status> {
        self.answer(Method::DisarmGraph, async {
            let default_ms = self.control.settings.default_deadline_ms;
            let (grant, deadline, request) =
                self.grant(request, default_ms, |request| request.session.take())?;
            let pair = parse_pair(request.pair)?;
            let control = Arc::clone(&self.control);
            let disarm = async move {
                let _turn = turn(&grant, deadline).await?;
                grant.device.disarm_graph(grant.id, pair).await?;
                control.sessions.remove_slots(grant.id, pair)
            };
            self.to_the_end(deadline, disarm).await?;
            Ok(v1::DisarmGraphReply { incarnation: self.control.incarnation.to_vec() })
        })
        .await
    }
}

impl Services {
    /// Who asks, for which session, until when.
    fn grant<R>(
        &self,
        request: Request<R>,
        default_ms: u32,
        session: impl FnOnce(&mut R) -> Option<v1::SessionRef>,
    ) -> Result<(Grant, Deadline, R), Refusal> {
        let caller = self.control.users.caller(&request)?;
        let deadline = Deadline::of(request.metadata(), default_ms);
        let mut request = request.into_inner();
        let grant = self.control.session(session(&mut request), caller)?;
        Ok((grant, deadline, request))
    }

    /// The same for new work, which a draining or overloaded daemon refuses.
    fn work<R>(
        &self,
        request: Request<R>,
        default_ms: u32,
        session: impl FnOnce(&mut R) -> Option<v1::SessionRef>,
    ) -> Result<(Work, R), Refusal> {
        let (grant, deadline, request) = self.grant(request, default_ms, session)?;
        let _admitted = self.control.admit()?;
        Ok((Work { control: Arc::clone(&self.control), grant, deadline, _admitted }, request))
    }

    /// Registers a region; a caller that does not wait for its id has it taken back.
    async fn register(
        &self,
        work: Work,
        request: v1::RegisterRegionRequest,
    ) -> Result<RegionId, Refusal> {
        let deadline = work.deadline;
        let (answer, answered) = oneshot::channel();
        self.control.tasks.spawn(async move {
            let _turn = match turn(&work.grant, deadline).await {
                Ok(turn) => turn,
                Err(refusal) => {
                    // A caller that is gone needs no answer.
                    let _ = answer.send(Err(refusal));
                    return;
                }
            };
            let region = import(&work, request).await;
            if let Err(Ok(region)) = answer.send(region) {
                take_back(&work, region).await;
            }
        });
        match tokio::time::timeout_at(deadline.instant(), answered).await {
            Ok(Ok(region)) => region,
            Ok(Err(_)) => Err(goes_on("ended without an answer")),
            Err(_) => {
                let sentence =
                    "The region was not mapped within the call's deadline and is taken back";
                Err(Refusal::new(RefusalCode::DeadlineExceeded, sentence))
            }
        }
    }
}

async fn import(work: &Work, request: v1::RegisterRegionRequest) -> Result<RegionId, Refusal> {
    let (sessions, id) = (&work.control.sessions, work.grant.id);
    let (control, grant) = (Arc::clone(&work.control), work.grant.clone());
    let offered = closing(move || take_memory(&control, &grant, request)).await?;
    let Offered { kind, bytes, pieces, file } = offered;
    let region = RegionRecord { id: sessions.next_region(id)?, kind, bytes, pieces };
    let id_of_region = region.id;
    match work.grant.device.import_region(id, region.clone()).await {
        Ok(()) => sessions.add_region(id, region, file)?,
        Err(refusal) => {
            closing(move || {
                drop(region);
                Err(refusal)
            })
            .await?;
        }
    }
    Ok(id_of_region)
}

/// Does what may close a foreign descriptor, which may take as long as its file system likes, away from the threads that
/// serve.
async fn closing<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err(goes_on("ended by itself")))
}

/// Takes the descriptors that the request names, and checks that they are the memory that it announces.
fn take_memory(
    control: &Control,
    grant: &Grant,
    request: v1::RegisterRegionRequest,
) -> Result<Offered, Refusal> {
    // Taken first: whatever is wrong, nothing stays behind under the tag.
    let descriptors = match &request.descriptors {
        Some(named) => control.sessions.take_descriptors(grant.id, named.tag, named.count)?,
        None => Vec::new(),
    };
    let terms = Terms {
        device: grant.device.description(),
        limits: &control.settings.limits,
        has_pieces: grant.version.has_pieces(),
    };
    terms.parse(request, descriptors)
}

/// Gives back a region whose caller never heard of it.
async fn take_back(work: &Work, region: RegionId) {
    let id = work.grant.id;
    let Ok(held) = work.control.sessions.remove_region(id, region) else { return };
    let dropped = work.grant.device.drop_region(id, region).await;
    let closed = closing(move || {
        drop(held);
        dropped
    });
    if let Err(refusal) = closed.await {
        tracing::warn!(session = id.0, region = region.0, %refusal, "a region was not taken back");
    }
}

async fn release_region(
    control: Arc<Control>,
    grant: Grant,
    deadline: Deadline,
    request: v1::ReleaseRegionRequest,
) -> Result<(), Refusal> {
    let _turn = turn(&grant, deadline).await?;
    let region = RegionId(request.region_id);
    let held = control.sessions.remove_region(grant.id, region)?;
    let dropped = grant.device.drop_region(grant.id, region).await;
    closing(move || {
        drop(held);
        dropped
    })
    .await
}

async fn rebind(work: Work, request: v1::RebindRequest) -> Result<(), Refusal> {
    let _turn = turn(&work.grant, work.deadline).await?;
    let (sessions, id) = (&work.control.sessions, work.grant.id);
    let published = sessions.published(id)?;
    let regions = sessions.regions(id)?;
    let ground = Ground {
        device: work.grant.device.description().uuid,
        regions: &regions,
        limits: &work.control.settings.limits,
    };
    let moves = ground.parse_rebind(request.layers, &published)?;
    let moved = Arc::new(published.moved(&moves));
    work.grant.device.rebind(id, moves).await?;
    sessions.move_layers(id, moved)
}

async fn arm_graph(work: Work, request: v1::ArmGraphRequest) -> Result<(), Refusal> {
    let Work { control, grant, deadline, .. } = &work;
    if !grant.version.has_lanes() {
        let version = grant.version.get();
        let sentence = format!("A session of protocol version {version} has no graphs");
        return Err(Refusal::new(RefusalCode::VersionMismatch, sentence).about("pair"));
    }
    let _turn = turn(grant, *deadline).await?;
    let (sessions, id) = (&control.sessions, grant.id);
    sessions.published(id)?;
    let slot = parse_slot(id, request, control.settings.default_deadline_ms)?;
    sessions.check_slot(id, slot.pair, slot.slot)?;
    grant.device.arm_graph(id, slot).await?;
    sessions.add_slot(id, slot.pair, slot.slot)
}
