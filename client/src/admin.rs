//! Calls that need no session: what an operator asks.

use std::time::Duration;

use statecopy_proto::{MESSAGE_BYTES_MAX, v1};
use tonic::transport::Channel;
use v1::admin_service_client::AdminServiceClient;

use crate::address::Address;
use crate::call::{Call, Failure};
use crate::error::Error;
use crate::link::channel;

/// An operator's connection: it opens no session and shows in no status.
#[derive(Debug, Clone)]
pub struct Admin {
    address: Address,
    stub: AdminServiceClient<Channel>,
    timeout: Duration,
}

impl Admin {
    /// Connects, once. Every call has that long to be answered, and so has connecting.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when no daemon listens there.
    pub async fn connect(address: Address, timeout: Duration) -> Result<Self, Error> {
        let call = Call::new("connect", timeout);
        match channel(&address, &call).await {
            Ok(channel) => Ok(Self::on(address, channel, timeout)),
            Err(failure) => Err(call.error(&address, failure)),
        }
    }

    pub(crate) fn on(address: Address, channel: Channel, timeout: Duration) -> Self {
        let stub = AdminServiceClient::new(channel)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        Self { address, stub, timeout }
    }

    /// Asks whether the supervisor lives.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn ping(&self) -> Result<v1::PingReply, Error> {
        let call = Call::new("ping", self.timeout);
        let mut stub = self.stub.clone();
        let done = async { call.answer(stub.ping(call.request(v1::PingRequest {})?)).await };
        done.await.map_err(|failure| self.error(&call, failure).of_question())
    }

    /// Everything that `statecopy status` shows.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub async fn inspect(&self) -> Result<v1::InspectReply, Error> {
        let call = Call::new("inspect", self.timeout);
        let mut stub = self.stub.clone();
        let done = async { call.answer(stub.inspect(call.request(v1::InspectRequest {})?)).await };
        done.await.map_err(|failure| self.error(&call, failure).of_question())
    }

    /// Asks the daemon to finish what it accepted and to end: the same as SIGTERM.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn drain(&self) -> Result<v1::DrainReply, Error> {
        let call = Call::new("drain", self.timeout);
        let mut stub = self.stub.clone();
        let done = async { call.answer(stub.drain(call.request(v1::DrainRequest {})?)).await };
        done.await.map_err(|failure| self.error(&call, failure))
    }

    fn error(&self, call: &Call, failure: Failure) -> Error {
        call.error(&self.address, failure)
    }
}
