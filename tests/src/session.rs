//! A session, spoken by hand.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use statecopy_descriptors::{ChannelError, Connection};
use statecopy_proto::descriptor_socket::{
    ATTACHED_DESCRIPTORS, DaemonRecord, RECORD_BYTES_MAX, Token, WorkerRecord,
};
use statecopy_proto::v1::register_layers_event::Event as RegisterEvent;
use statecopy_proto::v1::{
    self, BindingSetSpec, CopyManyReply, CopyManyRequest, CopyReply, CopyRequest, DirectedCopy,
    HandleKind, LayerSpec, OpenReply, OpenRequest, RebindLayer, RebindRequest,
    RegisterLayersRequest, RegisterRegionRequest, ReleaseLayersRequest, ReleaseRegionRequest,
    SessionRef,
};
use statecopy_proto::{Direction, PROTOCOL_NEWEST, Refusal};
use tonic::Streaming;

use crate::poll::PATIENCE;
use crate::shared::Shared;
use crate::wire::{Wire, refusal};

/// What a registration published.
pub type Published = v1::Published;

/// An open session whose descriptor socket is attached. Dropping it closes that socket, which ends the session.
#[derive(Debug)]
pub struct Session {
    wire: Wire,
    /// What the daemon said when it was opened.
    pub opened: OpenReply,
    connection: Connection,
    ring: Vec<OwnedFd>,
    next_tag: u64,
}

impl Session {
    /// Opens a session of the newest protocol version and attaches.
    ///
    /// # Panics
    /// When it is refused.
    #[must_use]
    pub fn open(wire: &Wire) -> Self {
        let request = OpenRequest {
            protocol_version: PROTOCOL_NEWEST,
            label: "end-to-end".to_owned(),
            ..OpenRequest::default()
        };
        Self::open_as(wire, request).unwrap_or_else(|refusal| panic!("{refusal}"))
    }

    /// Opens a session as asked and attaches.
    ///
    /// # Errors
    /// Why it was refused.
    pub fn open_as(wire: &Wire, request: OpenRequest) -> Result<Self, Refusal> {
        let opened = wire.ask(wire.sessions().open(request)).map_err(|status| refusal(&status))?;
        let connection = Self::dial(Path::new(&opened.descriptor_socket));
        let token = Token::parse(&opened.token).expect("a token");
        connection.send(&WorkerRecord::Attach { token }.encode(), &[]).expect("it listens");
        let (answer, ring) = hear_all(&connection).expect("an answer");
        assert_eq!(answer, DaemonRecord::Attached);
        Ok(Self { wire: wire.clone(), opened, connection, ring, next_tag: 1 })
    }

    /// Connects to a descriptor socket, and says nothing.
    ///
    /// # Panics
    /// When nobody listens there.
    #[must_use]
    pub fn dial(socket: &Path) -> Connection {
        let connection = Connection::connect_within(socket, Some(PATIENCE));
        connection.expect("the descriptor socket")
    }

    /// The wire that it was opened on.
    #[must_use]
    pub fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Its descriptor socket.
    #[must_use]
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// What came when it was attached: session memory, the executor's doorbell, a pidfd of the device process.
    #[must_use]
    pub fn ring(&self) -> &[OwnedFd] {
        &self.ring
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.opened.session_id
    }

    /// How calls name it.
    #[must_use]
    pub fn reference(&self) -> Option<SessionRef> {
        let incarnation = self.opened.incarnation.clone();
        Some(SessionRef { incarnation, session_id: self.opened.session_id })
    }

    /// A tag that was not used before.
    pub fn tag(&mut self) -> u64 {
        self.next_tag += 1;
        self.next_tag
    }

    /// Sends a message on the descriptor socket, and hears the answer; `None` when the daemon closes the connection.
    pub fn say(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Option<DaemonRecord> {
        Self::exchange(&self.connection, bytes, descriptors)
    }

    /// Hears the next record of the daemon; `None` when it closes the connection.
    ///
    /// # Panics
    /// When what comes is no record of a daemon, or nothing comes.
    #[must_use]
    pub fn hear(&self) -> Option<DaemonRecord> {
        hear(&self.connection)
    }

    /// Sends descriptors under a new tag, properly.
    ///
    /// # Panics
    /// When they are refused.
    pub fn send(&mut self, descriptors: &[BorrowedFd<'_>]) -> u64 {
        let tag = self.tag();
        let count = u32::try_from(descriptors.len()).expect("few descriptors");
        let answer = self.say(&WorkerRecord::Descriptors { tag, count }.encode(), descriptors);
        assert_eq!(answer, Some(DaemonRecord::Received { tag, total: count }));
        tag
    }

    /// A proper request to register memory of that size whose one descriptor was sent under `tag`.
    #[must_use]
    pub fn region_request(&self, tag: u64, size_bytes: u64) -> RegisterRegionRequest {
        RegisterRegionRequest {
            session: self.reference(),
            kind: HandleKind::Memfd.into(),
            size_bytes,
            descriptors: Some(v1::DescriptorRef { tag, count: 1 }),
            pieces: Vec::new(),
        }
    }

    /// Registers a region as asked.
    ///
    /// # Errors
    /// Why it was refused.
    pub fn register_region(&self, request: RegisterRegionRequest) -> Result<u64, Refusal> {
        let reply = self.wire.ask(self.wire.registry().register_region(request));
        reply.map(|reply| reply.region_id).map_err(|status| refusal(&status))
    }

    /// Sends a descriptor and registers it as memory of that size.
    ///
    /// # Errors
    /// Why the registration was refused.
    pub fn offer(&mut self, descriptor: BorrowedFd<'_>, bytes: u64) -> Result<u64, Refusal> {
        let tag = self.send(&[descriptor]);
        self.register_region(self.region_request(tag, bytes))
    }

    /// Registers shared memory.
    ///
    /// # Panics
    /// When it is refused.
    pub fn share(&mut self, memory: &Shared) -> u64 {
        self.offer(memory.descriptor(), memory.bytes())
            .unwrap_or_else(|refusal| panic!("{refusal}"))
    }

    /// Gives a region back.
    ///
    /// # Errors
    /// Why it was refused.
    pub fn release_region(&self, region_id: u64) -> Result<(), Refusal> {
        let request = ReleaseRegionRequest { session: self.reference(), region_id };
        let reply = self.wire.ask(self.wire.registry().release_region(request));
        reply.map(drop).map_err(|status| refusal(&status))
    }

    /// Registers layers and sets, and waits until they are published.
    ///
    /// # Errors
    /// Why nothing was published.
    pub fn register_layers(
        &self,
        layers: Vec<LayerSpec>,
        sets: Vec<BindingSetSpec>,
    ) -> Result<Published, Refusal> {
        let request = RegisterLayersRequest { session: self.reference(), layers, sets };
        let failed = |status| refusal(&status);
        let mut stream =
            self.wire.ask(self.wire.registry().register_layers(request)).map_err(failed)?;
        let mut published = None;
        while let Some(event) = self.next(&mut stream).map_err(failed)? {
            assert!(published.is_none(), "an event after the last");
            if let Some(RegisterEvent::Published(done)) = event.event {
                published = Some(done);
            }
        }
        Ok(published.expect("the last event is what was published"))
    }

    /// The next message of a stream.
    ///
    /// # Errors
    /// What it ended with.
    pub fn next<T>(&self, stream: &mut Streaming<T>) -> Result<Option<T>, tonic::Status> {
        self.wire.wait(stream.message())
    }

    /// Withdraws the layers.
    ///
    /// # Errors
    /// Why it was refused.
    pub fn release_layers(&self) -> Result<(), Refusal> {
        let request = ReleaseLayersRequest { session: self.reference() };
        let reply = self.wire.ask(self.wire.registry().release_layers(request));
        reply.map(drop).map_err(|status| refusal(&status))
    }

    /// Moves layers.
    ///
    /// # Errors
    /// Why it was refused.
    pub fn rebind(&self, layers: Vec<RebindLayer>) -> Result<(), Refusal> {
        let request = RebindRequest { session: self.reference(), layers };
        let reply = self.wire.ask(self.wire.registry().rebind(request));
        reply.map(drop).map_err(|status| refusal(&status))
    }

    /// One copy, as asked.
    ///
    /// # Errors
    /// Why it was refused.
    pub fn copy(&self, direction: Direction, request: CopyRequest) -> Result<CopyReply, Refusal> {
        let reply = match direction {
            Direction::Gather => self.wire.ask(self.wire.copies().gather(request)),
            Direction::Scatter => self.wire.ask(self.wire.copies().scatter(request)),
        };
        reply.map_err(|status| refusal(&status))
    }

    /// Several copies in one call.
    ///
    /// # Errors
    /// Why the call was refused as a whole.
    pub fn copy_many(&self, copies: Vec<DirectedCopy>) -> Result<CopyManyReply, Refusal> {
        let request = CopyManyRequest { session: self.reference(), copies };
        self.wire.ask(self.wire.copies().copy_many(request)).map_err(|status| refusal(&status))
    }

    /// Says something on a descriptor socket, and hears the answer; `None` when the daemon closes the connection.
    ///
    /// # Panics
    /// When the answer is no record of a daemon, or does not come.
    pub fn exchange(
        connection: &Connection,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Option<DaemonRecord> {
        match connection.send(bytes, descriptors) {
            Ok(()) | Err(ChannelError::Closed) => {}
            Err(error) => panic!("{error}"),
        }
        hear(connection)
    }
}

fn hear(connection: &Connection) -> Option<DaemonRecord> {
    hear_all(connection).map(|(said, _)| said)
}

/// The next record and its descriptors, but for the news of another device process, which comes by itself.
fn hear_all(connection: &Connection) -> Option<(DaemonRecord, Vec<OwnedFd>)> {
    let mut record = [0; RECORD_BYTES_MAX];
    loop {
        let received = match connection.receive(&mut record, ATTACHED_DESCRIPTORS as usize) {
            Ok(received) => received,
            Err(ChannelError::Closed) => return None,
            Err(error) => panic!("{error}"),
        };
        let said = DaemonRecord::decode(&record[..received.bytes]).expect("a record of the daemon");
        if said != DaemonRecord::DeviceProcess {
            return Some((said, received.descriptors));
        }
    }
}
