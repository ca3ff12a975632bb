//! Events: places in the work of streams.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::abi::{CUresult, Opaque, capture_status};
use crate::captures::Capture;
use crate::process::{Answer, Process};
use crate::streams::{Place, Work};
use crate::trace::Object;

/// An event.
#[derive(Debug, Default)]
pub(crate) struct Event(Mutex<Recorded>);

/// Where it was recorded last.
#[derive(Debug, Clone, Default)]
enum Recorded {
    #[default]
    Never,
    At(Place),
    In(Arc<Capture>),
}

impl Event {
    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Process {
    fn event(&self, handle: Opaque) -> Answer<Arc<Event>> {
        self.objects().events.get(&handle).cloned().ok_or(CUresult::INVALID_HANDLE)
    }

    pub(crate) fn create_event(&self) -> Opaque {
        let handle = self.control.number() << 4;
        self.objects().events.insert(handle, Arc::default());
        self.trace.add(Object::Event);
        handle
    }

    pub(crate) fn destroy_event(&self, handle: Opaque) -> Answer {
        self.objects().events.remove(&handle).ok_or(CUresult::INVALID_HANDLE)?;
        self.trace.remove(Object::Event);
        Ok(())
    }

    pub(crate) fn record_event(self: &Arc<Self>, event: Opaque, stream: Opaque) -> Answer {
        let (event, stream) = (self.event(event)?, self.stream(stream)?);
        *event.recorded() = match stream.capture() {
            Some(capture) if capture.status() == capture_status::ACTIVE => Recorded::In(capture),
            Some(_) => return Err(CUresult::STREAM_CAPTURE_INVALIDATED),
            None => Recorded::At(stream.place()),
        };
        Ok(())
    }

    /// A stream waits for an event; for one of a capture it joins the capture.
    pub(crate) fn wait_for_event(self: &Arc<Self>, stream: Opaque, event: Opaque) -> Answer {
        let (event, stream) = (self.event(event)?, self.stream(stream)?);
        let recorded = event.recorded().clone();
        match (recorded, stream.capture()) {
            (Recorded::Never, _) => Ok(()),
            (Recorded::At(place), None) => stream.push(Work::After(place)),
            (Recorded::In(capture), None) => {
                stream.set_capture(Some(capture));
                Ok(())
            }
            (Recorded::In(capture), Some(own)) if Arc::ptr_eq(&capture, &own) => Ok(()),
            (Recorded::At(_) | Recorded::In(_), Some(_)) => Err(CUresult::STREAM_CAPTURE_ISOLATION),
        }
    }

    pub(crate) fn query_event(&self, event: Opaque) -> Answer {
        let recorded = self.event(event)?.recorded().clone();
        match recorded {
            Recorded::In(_) => Err(CUresult::CAPTURED_EVENT),
            Recorded::At(place) if !place.is_reached() => Err(CUresult::NOT_READY),
            Recorded::At(_) | Recorded::Never => self.sticky(),
        }
    }
}
