//! The gRPC services: each call is checked, answered within its deadline, timed and counted.

mod admin;
mod copies;
mod deadline;
mod registry;
mod session;

use std::sync::Arc;
use std::time::Instant;

use statecopy_proto::v1::admin_service_server::AdminServiceServer;
use statecopy_proto::v1::copy_service_server::CopyServiceServer;
use statecopy_proto::v1::registry_service_server::RegistryServiceServer;
use statecopy_proto::v1::session_service_server::SessionServiceServer;
use statecopy_proto::{DESCRIPTOR_SET, MESSAGE_BYTES_MAX, Refusal, RefusalCode};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tonic::service::Routes;
use tonic::{Response, Status};
use tonic_health::pb::health_server::{Health, HealthServer};

use self::deadline::Deadline;
use super::control::Control;
use super::sessions::Grant;

/// The services' names, for health.
pub(crate) const SERVICE_NAMES: [&str; 5] = [
    "",
    "statecopy.v1.SessionService",
    "statecopy.v1.RegistryService",
    "statecopy.v1.CopyService",
    "statecopy.v1.AdminService",
];

/// A method of the control wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Open,
    Events,
    Close,
    RegisterRegion,
    ReleaseRegion,
    RegisterLayers,
    Rebind,
    ReleaseLayers,
    ArmGraph,
    DisarmGraph,
    Gather,
    Scatter,
    CopyMany,
    Ping,
    Inspect,
    Drain,
}

impl Method {
    /// Every method.
    pub(crate) const ALL: [Self; 16] = [
        Self::Open,
        Self::Events,
        Self::Close,
        Self::RegisterRegion,
        Self::ReleaseRegion,
        Self::RegisterLayers,
        Self::Rebind,
        Self::ReleaseLayers,
        Self::ArmGraph,
        Self::DisarmGraph,
        Self::Gather,
        Self::Scatter,
        Self::CopyMany,
        Self::Ping,
        Self::Inspect,
        Self::Drain,
    ];

    /// The name in metrics and logs.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Open => "Open",
            Self::Events => "Events",
            Self::Close => "Close",
            Self::RegisterRegion => "RegisterRegion",
            Self::ReleaseRegion => "ReleaseRegion",
            Self::RegisterLayers => "RegisterLayers",
            Self::Rebind => "Rebind",
            Self::ReleaseLayers => "ReleaseLayers",
            Self::ArmGraph => "ArmGraph",
            Self::DisarmGraph => "DisarmGraph",
            Self::Gather => "Gather",
            Self::Scatter => "Scatter",
            Self::CopyMany => "CopyMany",
            Self::Ping => "Ping",
            Self::Inspect => "Inspect",
            Self::Drain => "Drain",
        }
    }
}

/// One implementation of every service.
#[derive(Debug, Clone)]
pub(crate) struct Services {
    control: Arc<Control>,
}

/// Every service of the control socket.
///
/// # Errors
/// When the descriptor set that this build holds cannot be read.
pub(crate) fn routes(
    control: &Arc<Control>,
    health: HealthServer<impl Health>,
) -> Result<Routes, tonic_reflection::server::Error> {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    let services = Services { control: Arc::clone(control) };
    let mut routes = Routes::builder();
    routes
        .add_service(health)
        .add_service(reflection)
        .add_service(
            SessionServiceServer::new(services.clone())
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
        )
        .add_service(
            RegistryServiceServer::new(services.clone())
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
        )
        .add_service(
            CopyServiceServer::new(services.clone())
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
        )
        .add_service(
            AdminServiceServer::new(services)
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
        );
    Ok(routes.routes())
}

impl Services {
    /// Times and counts a call, and turns its refusal into a status.
    async fn answer<T>(
        &self,
        method: Method,
        work: impl Future<Output = Result<T, Refusal>>,
    ) -> Result<Response<T>, Status> {
        let started = Instant::now();
        let answer = work.await;
        self.control.metrics.called(method, started.elapsed());
        answer.map(Response::new).map_err(|refusal| {
            self.control.refused(method.label(), &refusal);
            refusal.to_status()
        })
    }

    /// Does work that comes to its end whatever becomes of its caller.
    async fn to_the_end<T: Send + 'static>(
        &self,
        deadline: Deadline,
        work: impl Future<Output = Result<T, Refusal>> + Send + 'static,
    ) -> Result<T, Refusal> {
        let (answer, answered) = oneshot::channel();
        self.control.tasks.spawn(async move {
            // A caller that is gone needs no answer.
            let _ = answer.send(work.await);
        });
        match tokio::time::timeout_at(deadline.instant(), answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(goes_on("ended without an answer")),
            Err(_) => Err(goes_on("did not end within the call's deadline, and goes on")),
        }
    }
}

fn goes_on(what: &str) -> Refusal {
    Refusal::new(RefusalCode::Unavailable, format!("The work {what}"))
        .remedied_by("See `statecopy status`; close the session to give everything back.")
}

/// Waits for a session's turn: whoever changes what it owns has it alone.
async fn turn(grant: &Grant, deadline: Deadline) -> Result<OwnedSemaphorePermit, Refusal> {
    let turn = Arc::clone(&grant.turn).acquire_owned();
    match tokio::time::timeout_at(deadline.instant(), turn).await {
        Ok(Ok(permit)) => Ok(permit),
        Ok(Err(_)) | Err(_) => {
            let sentence = format!(
                "Session {} was busy with an earlier registration, release or rebind",
                grant.id
            );
            Err(Refusal::new(RefusalCode::DeadlineExceeded, sentence))
        }
    }
}
