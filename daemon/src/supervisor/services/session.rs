//! Open, Events, Close.

use std::sync::Arc;
use std::time::Duration;

use statecopy_kernels::signature::DeviceUuid;
use statecopy_proto::descriptor_socket::{TOKEN_BYTES, Token};
use statecopy_proto::v1::session_service_server::SessionService;
use statecopy_proto::{ProtocolVersion, Refusal, RefusalCode, v1};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::{Deadline, Method, Services};
use crate::supervisor::device::DeviceHandle;
use crate::supervisor::message;
use crate::supervisor::peer::Caller;
use crate::supervisor::sessions::{EndReason, EventItem, Opening, end_session, watch_attach};

/// The longest label of a session, in bytes.
const LABEL_BYTES_MAX: usize = 128;

#[tonic::async_trait]
impl SessionService for Services {
    async fn open(
        &self,
        request: Request<v1::OpenRequest>,
    ) -> Result<Response<v1::OpenReply>, Status> {
        self.answer(Method::Open, async {
            let caller = self.control.users.caller(&request)?;
            self.open_session(caller, request.into_inner())
        })
        .await
    }

    type EventsStream = ReceiverStream<EventItem>;

    async fn events(
        &self,
        request: Request<v1::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        self.answer(Method::Events, async {
            let caller = self.control.users.caller(&request)?;
            let grant = self.control.session(request.into_inner().session, caller)?;
            let (sender, receiver) = self.control.sessions.subscribe(grant.id)?;
            if self.control.draining.is_cancelled() {
                let grace_ms = self.control.settings.drain_grace_ms;
                // The stream is new: there is room.
                let _ = sender.try_send(Ok(message::draining(self.control.incarnation, grace_ms)));
            }
            Ok(ReceiverStream::new(receiver))
        })
        .await
    }

    async fn close(
        &self,
        request: Request<v1::CloseRequest>,
    ) -> Result<Response<v1::CloseReply>, Status> {
        self.answer(Method::Close, async {
            let caller = self.control.users.caller(&request)?;
            let default_ms = self.control.settings.default_deadline_ms;
            let deadline = Deadline::of(request.metadata(), default_ms);
            let grant = self.control.session(request.into_inner().session, caller)?;
            if let Some(ended) = self.control.sessions.end(grant.id, EndReason::Closed) {
                let control = Arc::clone(&self.control);
                let end = async move {
                    end_session(control, ended).await;
                    Ok(())
                };
                self.to_the_end(deadline, end).await?;
            }
            Ok(v1::CloseReply { incarnation: self.control.incarnation.to_vec() })
        })
        .await
    }
}

impl Services {
    fn open_session(
        &self,
        caller: Caller,
        request: v1::OpenRequest,
    ) -> Result<v1::OpenReply, Refusal> {
        self.control.accepting()?;
        let version = ProtocolVersion::agree(request.protocol_version)?;
        let label = if version.has_label() { request.label } else { String::new() };
        if label.len() > LABEL_BYTES_MAX {
            let given = label.len();
            let sentence = format!("The label has {given} bytes; the most is {LABEL_BYTES_MAX}");
            return Err(Refusal::new(RefusalCode::QuotaExceeded, sentence)
                .about("label")
                .remedied_by("Give the session a shorter label."));
        }
        let device = self.device(&request.device_uuid)?;
        let description = message::device_description(device.description());
        let token = random_token()?;
        let settings = &self.control.settings;
        let until = Instant::now() + Duration::from_millis(settings.attach_timeout_ms.into());
        let grant = self.control.sessions.open(Opening {
            caller,
            version,
            label,
            device: device.clone(),
            token: token.clone(),
            until: until.into_std(),
        })?;
        let id = grant.id;
        self.control.metrics.session_opened();
        if let Some(suppressed) = self.control.session_line() {
            let Caller { uid, pid } = caller;
            tracing::info!(session = id.0, uid, pid, suppressed, "session opened");
        }
        self.control.tasks.spawn(watch_attach(Arc::clone(&self.control), grant, until));
        Ok(v1::OpenReply {
            incarnation: self.control.incarnation.to_vec(),
            session_id: id.0,
            protocol_version: version.get(),
            device: Some(description),
            descriptor_socket: self.control.descriptor_socket.to_string_lossy().into_owned(),
            token: token.as_bytes().to_vec(),
            attach_timeout_ms: settings.attach_timeout_ms,
            limits: Some(message::limits(&settings.limits)),
        })
    }

    /// The device of that UUID; the only one where none is named.
    fn device(&self, asked: &str) -> Result<&DeviceHandle, Refusal> {
        let devices = &self.control.devices;
        if asked.is_empty()
            && let [only] = devices.as_slice()
        {
            return Ok(only);
        }
        // As nvidia-smi prints it, or as the daemon does.
        let uuid: Option<DeviceUuid> = asked.parse().ok();
        let found = devices.iter().find(|device| Some(device.description().uuid) == uuid);
        found.ok_or_else(|| {
            let served: Vec<String> = devices
                .iter()
                .map(|device| {
                    let description = device.description();
                    format!("{} ({})", description.uuid, description.name)
                })
                .collect();
            let served = served.join(", ");
            if asked.is_empty() {
                let sentence =
                    format!("The session names none of the devices served here: {served}");
                return Refusal::new(RefusalCode::DeviceNotVisible, sentence)
                    .about("device_uuid")
                    .remedied_by(
                        "Name one by its UUID when the session is opened (ConnectOptions::device).",
                    );
            }
            let asked: String = asked.chars().take(64).collect();
            let sentence = format!("Device {asked} is not served here; served: {served}");
            Refusal::new(RefusalCode::DeviceNotVisible, sentence).about("device_uuid")
        })
    }
}

fn random_token() -> Result<Token, Refusal> {
    let mut bytes = [0; TOKEN_BYTES];
    match crate::supervisor::random::fill(&mut bytes) {
        Ok(()) => Ok(Token::new(bytes)),
        Err(error) => {
            let sentence = format!("The system has no random bytes: {error}");
            Err(Refusal::new(RefusalCode::Unavailable, sentence))
        }
    }
}
