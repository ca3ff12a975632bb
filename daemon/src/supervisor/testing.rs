//! What the supervisor's tests share: a scripted device, a daemon around it, and workers that call it.

mod daemon;
mod device;

pub(crate) use self::daemon::{
    TestDaemon, Worker, code, connect, eventually, layer, published, reference,
};
pub(crate) use self::device::{UUID, refusal, scripted_device};
