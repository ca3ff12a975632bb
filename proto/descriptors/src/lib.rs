//! Descriptors that cross process boundaries: memory, sockets, processes, doorbells.
//!
//! **What it is.** Owners for the file descriptors of statecopy: [`SealedMemory`] is shared memory that can never shrink
//! under a mapping, [`Mapping`] is that memory mapped, [`Connection`] is a message socket that passes descriptors,
//! [`Peer`] is who sits at its other end, [`Doorbell`] is something to sleep on. Everything that waits has a blocking form
//! here and, with the feature `async` (on by default), a form for tokio in [`asynchronous`].
//!
//! **What it is not.** It knows no session, region or request: it says that a descriptor is sealed memory of so many bytes,
//! never whether a peer may use it. It does not look after socket files: replacing a stale one is the daemon's.
//!
//! **Invariant.** Memory that another process can write is never behind a Rust reference to plain data: it is reached by
//! atomic loads and stores only, inside bounds that cannot change, because the file is sealed against shrinking before it
//! is mapped. So no peer can raise SIGBUS here, nor change a value between its check and its use once it has been copied.
//! A descriptor that arrives with a refused message is closed.
#![deny(unsafe_code)]

mod doorbell;
mod doorbell_set;
mod limits;
mod mapping;
mod memory;
mod peer;
mod process;
mod seqpacket;

#[cfg(feature = "async")]
pub mod asynchronous;

pub use doorbell::{Doorbell, DoorbellError, wait_any};
pub use doorbell_set::DoorbellSet;
pub use limits::{DescriptorLimit, raise_descriptor_limit};
pub use mapping::{Mapping, OutOfMapping};
pub use memory::{AllocationId, MemoryError, SealedMemory, file_bytes};
pub use peer::{Peer, PeerError};
pub use process::{has_exited, open_pidfd_self, pidfd_open, wait_for_exit};
pub use seqpacket::{
    ChannelError, Connection, DESCRIPTORS_PER_MESSAGE_MAX, MESSAGE_BYTES_MAX, Received,
};

#[cfg(feature = "async")]
pub use asynchronous::{AsyncConnection, AsyncDoorbell, Listener, process_exit};
