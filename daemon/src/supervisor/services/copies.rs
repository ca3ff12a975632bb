//! Gather, Scatter, CopyMany.

use std::time::Instant;

use statecopy_proto::v1::copy_service_server::CopyService;
use statecopy_proto::{Direction, Refusal, v1};
use tonic::{Request, Response, Status};

use super::{Deadline, Method, Services};
use crate::supervisor::copy_request::{parse_copy, parse_direction};
use crate::supervisor::message;
use crate::supervisor::sessions::Grant;

#[tonic::async_trait]
impl CopyService for Services {
    async fn gather(
        &self,
        request: Request<v1::CopyRequest>,
    ) -> Result<Response<v1::CopyReply>, Status> {
        self.answer(Method::Gather, self.copy_one(Direction::Gather, request)).await
    }

    async fn scatter(
        &self,
        request: Request<v1::CopyRequest>,
    ) -> Result<Response<v1::CopyReply>, Status> {
        self.answer(Method::Scatter, self.copy_one(Direction::Scatter, request)).await
    }

    async fn copy_many(
        &self,
        request: Request<v1::CopyManyRequest>,
    ) -> Result<Response<v1::CopyManyReply>, Status> {
        self.answer(Method::CopyMany, self.copy_all(request)).await
    }
}

impl Services {
    async fn copy_one(
        &self,
        direction: Direction,
        request: Request<v1::CopyRequest>,
    ) -> Result<v1::CopyReply, Refusal> {
        let caller = self.control.users.caller(&request)?;
        let default_ms = self.control.settings.default_deadline_ms;
        let deadline = Deadline::of(request.metadata(), default_ms);
        let mut request = request.into_inner();
        let grant = self.control.session(request.session.take(), caller)?;
        let admitted = self.control.admit();
        let answer = match admitted {
            Ok(_permit) => self.submit(&grant, direction, request, deadline).await,
            Err(refusal) => Err(refusal),
        };
        self.control.sessions.count_copy(grant.id, answer.is_ok());
        answer
    }

    /// One after the other: requests of one lane run in the order submitted, and a refused one does not stop the next.
    async fn copy_all(
        &self,
        request: Request<v1::CopyManyRequest>,
    ) -> Result<v1::CopyManyReply, Refusal> {
        let caller = self.control.users.caller(&request)?;
        let default_ms = self.control.settings.default_deadline_ms;
        let deadline = Deadline::of(request.metadata(), default_ms);
        let request = request.into_inner();
        let grant = self.control.session(request.session, caller)?;
        let _permit = self.control.admit()?;
        let mut answers = Vec::with_capacity(request.copies.len());
        for directed in request.copies {
            let answer = match parse_direction(directed) {
                Ok((direction, copy)) => self.submit(&grant, direction, copy, deadline).await,
                Err(refusal) => Err(refusal),
            };
            self.control.sessions.count_copy(grant.id, answer.is_ok());
            let answer = match answer {
                Ok(done) => v1::copy_answer::Answer::Done(done),
                Err(refusal) => {
                    self.control.refused(Method::CopyMany.label(), &refusal);
                    v1::copy_answer::Answer::Refused(refusal.to_message())
                }
            };
            answers.push(v1::CopyAnswer { answer: Some(answer) });
        }
        Ok(v1::CopyManyReply { incarnation: self.control.incarnation.to_vec(), answers })
    }

    /// Submits one copy and waits for its one answer. It is not given up once it has started: the deadline is for its
    /// start, and the device process keeps it.
    async fn submit(
        &self,
        grant: &Grant,
        direction: Direction,
        request: v1::CopyRequest,
        deadline: Deadline,
    ) -> Result<v1::CopyReply, Refusal> {
        self.control.sessions.published(grant.id)?;
        let default_ms = self.control.settings.default_deadline_ms;
        let start_by = deadline.within(request.deadline_ms, default_ms).instant().into_std();
        let copy = parse_copy(grant.id, direction, request, start_by)?;
        let submitted = Instant::now();
        let answer = grant.device.copy(copy).await;
        self.control.metrics.copied(direction, submitted.elapsed());
        answer.map(|moved| message::copy_reply(self.control.incarnation, moved))
    }
}
