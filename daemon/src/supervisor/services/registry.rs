//! RegisterRegion, ReleaseRegion, RegisterLayers, Rebind, ReleaseLayers.
//!
//! Each works in its session's turn and comes to its end whatever becomes of the caller, so that supervisor and device
//! process always agree on what a session owns.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use statecopy_descriptors::{MemoryError, SealedMemory};
use statecopy_kernels::device::AllocationId;
use statecopy_proto::v1::registry_service_server::RegistryService;
use statecopy_proto::{Refusal, RefusalCode, RegionId, SessionId, v1};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::{Deadline, Method, Services, goes_on, turn};
use crate::record::{RegionHandle, RegionRecord};
use crate::supervisor::control::Control;
use crate::supervisor::registering::{self, Registering};
use crate::supervisor::registration::Ground;
use crate::supervisor::sessions::{Grant, HeldRegion, within};

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
    let bytes = request.size_bytes;
    let kind = v1::HandleKind::try_from(request.kind).unwrap_or_default();
    let control = Arc::clone(&work.control);
    // What is refused is closed there: a foreign file system may take long for it.
    let take = tokio::task::spawn_blocking(move || take_memory(&control, id, kind, &request));
    let (fd, allocation) = take.await.unwrap_or_else(|_| Err(goes_on("ended by itself")))?;
    let region = sessions.next_region(id)?;
    let record = RegionRecord { id: region, handle: RegionHandle::Memfd(Arc::new(fd)), bytes };
    work.grant.device.import_region(id, record.clone()).await?;
    sessions.add_region(id, HeldRegion { record, kind, allocation })?;
    Ok(region)
}

/// Takes the descriptors that the request names, and checks that they are the memory that it announces.
fn take_memory(
    control: &Control,
    id: SessionId,
    kind: v1::HandleKind,
    request: &v1::RegisterRegionRequest,
) -> Result<(OwnedFd, AllocationId), Refusal> {
    // Taken first: whatever is wrong, nothing stays behind under the tag.
    let descriptors = match &request.descriptors {
        Some(named) => control.sessions.take_descriptors(id, named.tag, named.count)?,
        None => Vec::new(),
    };
    let bytes = request.size_bytes;
    let max = control.settings.limits.region_bytes_max;
    within("bytes in one region", "limits.region_bytes_max", bytes, max)?;
    let memory = adopt(kind, descriptors, &request.handle, bytes)?;
    let fd = memory.try_clone_fd().map_err(|error| no_descriptor(&error))?;
    let allocation = memory.allocation();
    Ok((fd, AllocationId(allocation.dev, allocation.ino)))
}

/// The memory that was offered.
fn adopt(
    kind: v1::HandleKind,
    descriptors: Vec<OwnedFd>,
    handle: &[u8],
    bytes: u64,
) -> Result<SealedMemory, Refusal> {
    let invalid = |sentence: String| Refusal::new(RefusalCode::HandleInvalid, sentence);
    match kind {
        v1::HandleKind::Memfd => {}
        v1::HandleKind::CudaIpc | v1::HandleKind::CudaVmm => {
            let kind = kind.as_str_name();
            let sentence = format!("The host device takes memory by MEMFD, not by {kind}");
            return Err(Refusal::new(RefusalCode::HandleUnsupported, sentence).about("kind"));
        }
        v1::HandleKind::Unspecified => {
            return Err(invalid("The handle is of no known kind".to_owned()).about("kind"));
        }
    }
    if !handle.is_empty() {
        let given = handle.len();
        let sentence = format!("A MEMFD travels by descriptor; {given} bytes of handle came too");
        return Err(invalid(sentence).about("handle"));
    }
    let [descriptor] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|descriptors| {
        let given = descriptors.len();
        invalid(format!("A MEMFD is one descriptor, not {given}")).about("descriptors")
    })?;
    SealedMemory::adopt(descriptor, bytes).map_err(|error| memory_refused(&error))
}

fn memory_refused(error: &MemoryError) -> Refusal {
    Refusal::new(RefusalCode::HandleInvalid, error.to_string()).about("descriptors")
}

fn no_descriptor(error: &std::io::Error) -> Refusal {
    let sentence = format!("The daemon can hold no more descriptors (RLIMIT_NOFILE): {error}");
    Refusal::new(RefusalCode::QuotaExceeded, sentence)
        .remedied_by("Release regions, or start the daemon with a higher limit of open files.")
}

/// Gives back a region whose caller never heard of it.
async fn take_back(work: &Work, region: RegionId) {
    let id = work.grant.id;
    if work.control.sessions.remove_region(id, region).is_ok()
        && let Err(refusal) = work.grant.device.drop_region(id, region).await
    {
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
    let _held = control.sessions.remove_region(grant.id, region)?;
    grant.device.drop_region(grant.id, region).await
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
