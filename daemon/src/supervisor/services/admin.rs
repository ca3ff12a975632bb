//! Ping, Inspect, Drain.

use std::time::Duration;

use statecopy_proto::v1::admin_service_server::AdminService;
use statecopy_proto::{Refusal, RefusalCode, v1};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::{Method, Services};
use crate::record::DeviceInspection;
use crate::supervisor::message;

/// How long a device process may take to list its plans. One that takes longer is shown without them.
const PLANS_WITHIN: Duration = Duration::from_secs(1);

#[tonic::async_trait]
impl AdminService for Services {
    async fn ping(
        &self,
        request: Request<v1::PingRequest>,
    ) -> Result<Response<v1::PingReply>, Status> {
        self.answer(Method::Ping, async {
            self.control.users.caller(&request)?;
            Ok(v1::PingReply {
                incarnation: self.control.incarnation.to_vec(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                uptime_ms: self.control.uptime_ms(),
            })
        })
        .await
    }

    async fn inspect(
        &self,
        request: Request<v1::InspectRequest>,
    ) -> Result<Response<v1::InspectReply>, Status> {
        self.answer(Method::Inspect, async {
            self.control.users.caller(&request)?;
            Ok(self.inspection().await)
        })
        .await
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainReply>, Status> {
        self.answer(Method::Drain, async {
            let caller = self.control.users.caller(&request)?;
            if !self.control.users.may_drain(caller) {
                let sentence = format!("User {} may not drain this daemon", caller.uid);
                return Err(Refusal::new(RefusalCode::PermissionDenied, sentence)
                    .remedied_by("Drain it as the user that it runs as, or as root."));
            }
            self.control.draining.cancel();
            Ok(v1::DrainReply {
                incarnation: self.control.incarnation.to_vec(),
                grace_ms: self.control.settings.drain_grace_ms,
            })
        })
        .await
    }
}

impl Services {
    async fn inspection(&self) -> v1::InspectReply {
        let control = &self.control;
        let until = Instant::now() + PLANS_WITHIN;
        let mut devices = Vec::with_capacity(control.devices.len());
        let mut rings = Vec::new();
        for device in &control.devices {
            let found = match tokio::time::timeout_at(until, device.inspect()).await {
                Ok(Ok(found)) => found,
                Ok(Err(_)) | Err(_) => DeviceInspection::default(),
            };
            devices.push(message::device_status(device, &found.plans));
            rings.extend(found.rings);
        }
        let mut sessions = control.sessions.inspect();
        for ring in rings {
            let of = sessions.iter_mut().find(|session| session.session_id == ring.session.0);
            if let Some(session) = of {
                session.copies += ring.copies;
                session.refusals += ring.refusals;
            }
        }
        v1::InspectReply {
            incarnation: control.incarnation.to_vec(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: control.uptime_ms(),
            supervisor_pid: std::process::id(),
            ready: control.not_ready().is_none(),
            draining: control.draining.is_cancelled(),
            http_address: control.http_address.clone(),
            devices,
            sessions,
            findings: message::findings(control),
        }
    }
}
