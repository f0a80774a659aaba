//! What the kernel programs tell a worker.

use std::cell::RefCell;
use std::io;
use std::os::fd::AsFd as _;
use std::rc::Rc;

use aya::maps::{MapData, RingBuf};
use broker_ebpf::abi::{Event, EventKind};

use crate::sys;

/// One worker's queue of events.
pub(super) struct Events {
    queue: RefCell<RingBuf<MapData>>,
}

impl Events {
    pub(super) fn new(queue: RingBuf<MapData>) -> Self {
        Self { queue: RefCell::new(queue) }
    }

    /// Takes what has been told so far.
    pub(super) fn take(&self) -> Vec<Event> {
        let mut queue = self.queue.borrow_mut();
        let mut events = Vec::new();
        while let Some(bytes) = queue.next() {
            events.extend(Event::from_bytes(&bytes));
        }
        events
    }

    /// Calls `hear` each time something is told, until dropped.
    pub(super) async fn forward(self: Rc<Self>, hear: Rc<dyn Fn()>) -> io::Result<()> {
        let fd = self.queue.borrow().as_fd().try_clone_to_owned()?;
        let told = sys::watch_readable(fd)?;
        loop {
            let mut ready = told.readable().await?;
            ready.clear_ready();
            hear();
        }
    }
}

/// The kind of an event; `None` for one that this build does not know.
pub(super) fn kind(event: &Event) -> Option<EventKind> {
    [EventKind::Slot, EventKind::Client, EventKind::Accept, EventKind::Blocking]
        .into_iter()
        .find(|kind| *kind as u32 == event.kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_that_are_not_known_are_none() {
        let event = Event { client: 7, slot: 5, kind: EventKind::Blocking as u32 };
        assert_eq!(kind(&event), Some(EventKind::Blocking));
        assert_eq!(kind(&Event { kind: 99, ..event }), None);
    }
}
