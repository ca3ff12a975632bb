//! The control wire, spoken by hand.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;

use statecopy_proto::v1::admin_service_client::AdminServiceClient;
use statecopy_proto::v1::copy_service_client::CopyServiceClient;
use statecopy_proto::v1::registry_service_client::RegistryServiceClient;
use statecopy_proto::v1::session_service_client::SessionServiceClient;
use statecopy_proto::v1::{InspectReply, InspectRequest};
use statecopy_proto::{MESSAGE_BYTES_MAX, Refusal};
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

use crate::poll::PATIENCE;

/// A gRPC connection to a daemon. Clones share it.
#[derive(Debug, Clone)]
pub struct Wire {
    runtime: Arc<Runtime>,
    channel: Channel,
}

/// The refusal inside a failed call's status.
///
/// # Panics
/// When there is none: every failed call must carry one.
#[must_use]
pub fn refusal(status: &Status) -> Refusal {
    Refusal::from_status(status).unwrap_or_else(|| panic!("a status without refusal: {status:?}"))
}

impl Wire {
    /// Connects to a control socket.
    ///
    /// # Errors
    /// When nobody listens there.
    pub fn connect(socket: &Path) -> Result<Self, tonic::transport::Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let endpoint = Endpoint::try_from(format!("unix://{}", socket.display()))?;
        let channel = runtime.block_on(endpoint.connect())?;
        Ok(Self { runtime: Arc::new(runtime), channel })
    }

    /// Waits for the answer of one call.
    ///
    /// # Errors
    /// What the call failed with.
    ///
    /// # Panics
    /// When there is no answer at all.
    pub fn ask<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Status> {
        self.wait(call).map(Response::into_inner)
    }

    /// Waits for anything that must come.
    ///
    /// # Panics
    /// When it does not within the patience.
    pub fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        let answer = self.runtime.block_on(async { timeout(PATIENCE, future).await });
        answer.expect("an answer in time")
    }

    /// The channel, for other clients.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Calls about sessions.
    #[must_use]
    pub fn sessions(&self) -> SessionServiceClient<Channel> {
        SessionServiceClient::new(self.channel())
    }

    /// Calls about regions and layers.
    #[must_use]
    pub fn registry(&self) -> RegistryServiceClient<Channel> {
        RegistryServiceClient::new(self.channel())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// Copies.
    #[must_use]
    pub fn copies(&self) -> CopyServiceClient<Channel> {
        CopyServiceClient::new(self.channel())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// Calls for operators.
    #[must_use]
    pub fn admin(&self) -> AdminServiceClient<Channel> {
        AdminServiceClient::new(self.channel()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// What the daemon shows of itself.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn inspect(&self) -> Result<InspectReply, Status> {
        self.ask(self.admin().inspect(InspectRequest {}))
    }
}
