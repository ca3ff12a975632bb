//! The streams of one launcher.

use super::context::Context;
use super::driver::DriverError;
use super::sys::Stream;

/// Streams of the highest priority. The one of launches without an order comes last.
#[derive(Debug)]
pub(super) struct Streams(Box<[Stream]>);

impl Streams {
    /// So many for launches in an order, and one for the others.
    pub(super) fn create(context: &Context, orders: u32) -> Result<Self, DriverError> {
        let current = context.enter()?;
        let mut streams = Vec::new();
        for _ in 0..=orders {
            match current.create_stream() {
                Ok(stream) => streams.push(stream),
                Err(error) => {
                    for stream in streams {
                        // SAFETY: the stream was created above and never used.
                        let _ended = unsafe { current.destroy_stream(stream) };
                    }
                    return Err(error);
                }
            }
        }
        Ok(Self(streams.into()))
    }

    pub(super) fn unordered(&self) -> Stream {
        self.0[self.orders()]
    }

    /// The stream of an order.
    ///
    /// # Panics
    /// When there is none for launches in an order.
    pub(super) fn of(&self, number: u32) -> Stream {
        self.0[number as usize % self.orders()]
    }

    pub(super) fn all(&self) -> &[Stream] {
        &self.0
    }

    fn orders(&self) -> usize {
        self.0.len() - 1
    }
}
