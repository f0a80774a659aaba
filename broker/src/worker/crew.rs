//! Tasks that take one job after another.
//!
//! To make a task for each client costs more than to parse its request: some kilobytes are allocated,
//! filled, entered in the runtime's list and given back.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tokio::sync::Notify;

/// Most tasks that rest at once: more than come within one turn of the event loop, and less memory than
/// a single buffer.
const RESTING_MAX: usize = 32;

/// What a task of the crew does.
pub(super) trait Job: 'static {
    /// Does it, to its end.
    async fn run(self);
}

/// The tasks of one worker that do jobs of one kind.
pub(super) struct Crew<J> {
    resting: RefCell<Vec<Rc<Desk<J>>>>,
}

/// Where a task finds its next job.
struct Desk<J> {
    job: Cell<Option<J>>,
    given: Notify,
}

impl<J> Default for Crew<J> {
    fn default() -> Self {
        Self { resting: RefCell::default() }
    }
}

impl<J: Job> Crew<J> {
    /// Has the job done by a task that rests, or else by a new one.
    pub(super) fn take_on(self: &Rc<Self>, job: J) {
        if let Some(desk) = self.resting.borrow_mut().pop() {
            desk.job.set(Some(job));
            desk.given.notify_one();
            return;
        }
        // Boxed, so that the runtime moves a pointer and not the whole job.
        tokio::task::spawn_local(Box::pin(Rc::clone(self).work(job)));
    }

    async fn work(self: Rc<Self>, first: J) {
        let desk = Rc::new(Desk { job: Cell::new(Some(first)), given: Notify::new() });
        loop {
            if let Some(job) = desk.job.take() {
                job.run().await;
                if self.resting.borrow().len() >= RESTING_MAX {
                    return;
                }
                self.resting.borrow_mut().push(Rc::clone(&desk));
            }
            desk.given.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Notes which task did it, when it is let go.
    struct Note {
        tasks: Rc<RefCell<Vec<tokio::task::Id>>>,
        go: Rc<Notify>,
    }

    impl Job for Note {
        async fn run(self) {
            self.go.notified().await;
            self.tasks.borrow_mut().push(tokio::task::id());
        }
    }

    #[derive(Default)]
    struct Rig {
        crew: Rc<Crew<Note>>,
        tasks: Rc<RefCell<Vec<tokio::task::Id>>>,
        go: Rc<Notify>,
    }

    impl Rig {
        fn take_on(&self, jobs: usize) {
            for _ in 0..jobs {
                let (tasks, go) = (Rc::clone(&self.tasks), Rc::clone(&self.go));
                self.crew.take_on(Note { tasks, go });
            }
        }

        /// Lets jobs end; answers how many tasks did them.
        async fn tasks(&self, jobs: usize) -> usize {
            while self.tasks.borrow().len() < jobs {
                self.go.notify_waiters();
                tokio::task::yield_now().await;
            }
            let tasks = self.tasks.take();
            assert_eq!(tasks.len(), jobs);
            tasks.into_iter().collect::<BTreeSet<_>>().len()
        }
    }

    fn with(test: impl AsyncFnOnce(Rig)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, test(Rig::default()));
    }

    #[test]
    fn one_after_another_is_done_by_the_same_task() {
        with(async |rig| {
            let first = {
                rig.take_on(1);
                rig.tasks(1).await;
                rig.crew.resting.borrow()[0].clone()
            };
            for _ in 0..10 {
                rig.take_on(1);
                assert!(rig.crew.resting.borrow().is_empty());
                rig.tasks(1).await;
                assert!(Rc::ptr_eq(&rig.crew.resting.borrow()[0], &first));
            }
        });
    }

    #[test]
    fn nobody_waits_for_another_and_few_stay() {
        with(async |rig| {
            let many = RESTING_MAX + 10;
            for _ in 0..2 {
                rig.take_on(many);
                assert_eq!(rig.tasks(many).await, many);
                assert_eq!(rig.crew.resting.borrow().len(), RESTING_MAX);
            }
        });
    }
}
