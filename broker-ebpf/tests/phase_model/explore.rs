//! Visits every state that a scenario can come to, breadth first, so that a counterexample is as
//! short as it can be.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::hash::{Hash as _, Hasher};

use broker_ebpf::phase::{Phase, Word};

use super::world::{Context, Mistake, Scenario, Thread, World};

/// A step that can be made.
pub(crate) struct Next {
    pub(crate) thread: Thread,
    pub(crate) what: &'static str,
    /// It will be made sooner or later, unlike a failure or a client's whim.
    pub(crate) fair: bool,
    pub(crate) world: World,
}

impl Next {
    pub(crate) fn fair(thread: Thread, what: &'static str, world: World) -> Self {
        Self { thread, what, fair: true, world }
    }

    pub(crate) fn free(thread: Thread, what: &'static str, world: World) -> Self {
        Self { thread, what, fair: false, world }
    }
}

/// What exploring a scenario has shown.
pub(crate) struct Outcome {
    pub(crate) name: &'static str,
    pub(crate) states: usize,
    pub(crate) violation: Option<Counterexample>,
    pub(crate) made: BTreeSet<(u8, Phase, Phase, bool)>,
}

/// The steps that lead to a broken rule.
pub(crate) struct Counterexample {
    pub(crate) rule: &'static str,
    pub(crate) steps: Vec<(Thread, &'static str)>,
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}:", self.rule)?;
        for (thread, what) in &self.steps {
            let name = match *thread {
                Thread::Client(index) => format!("client {}", ["A", "B", "C"][index]),
                Thread::Socket(index) => format!("socket {}", index + 1),
                Thread::Daemon => "daemon".to_owned(),
            };
            writeln!(f, "  {name}: {what}")?;
        }
        Ok(())
    }
}

/// Visits all states, or those up to the first that breaks a rule.
pub(crate) fn explore(scenario: &Scenario) -> Outcome {
    let mut context = Context { scenario, made: BTreeSet::new() };
    // 64 bits stand for a state: for two of a million to share them is one chance in 10^7.
    let mut seen = HashSet::new();
    let mut from = vec![(0, (Thread::Daemon, "starts"))];
    let mut front = vec![(0, World::new(scenario))];
    seen.insert(fingerprint(&front[0].1));
    let outcome =
        |violation, states, made| Outcome { name: scenario.name, states, violation, made };
    let mut all = Vec::new();
    while !front.is_empty() {
        for (index, mut world) in std::mem::take(&mut front) {
            world.steps(&mut context, &mut all);
            if !all.iter().any(|next| next.fair) {
                world.check_quiescent();
                if let Some(rule) = world.broken {
                    let violation = Some(Counterexample { rule, steps: path(&from, index) });
                    return outcome(violation, seen.len(), context.made);
                }
            }
            for mut next in all.drain(..) {
                if !seen.insert(fingerprint(&next.world)) {
                    continue;
                }
                from.push((index, (next.thread, next.what)));
                if !context.errs(Mistake::OwnerApart) {
                    next.world.check();
                }
                if let Some(rule) = next.world.broken {
                    let steps = path(&from, from.len() - 1);
                    let violation = Some(Counterexample { rule, steps });
                    return outcome(violation, seen.len(), context.made);
                }
                front.push((from.len() - 1, next.world));
            }
        }
    }
    outcome(None, seen.len(), context.made)
}

impl World {
    fn steps(&self, context: &mut Context, all: &mut Vec<Next>) {
        for &(thread, slot, owner) in &self.late_owners {
            let mut world = self.clone();
            world.slots[slot].word = Word::new(world.word(slot).phase(), owner);
            world.late_owners.retain(|&(t, ..)| t != thread);
            all.push(Next::fair(thread, "writes the owner", world));
        }
        let is_late = |thread| self.late_owners.iter().any(|&(t, ..)| t == thread);
        for index in 0..self.clients.len() {
            if !is_late(Thread::Client(index)) {
                self.client_steps(context, index, all);
            }
        }
        for index in 0..self.sockets.len() {
            if !is_late(Thread::Socket(index)) {
                self.socket_steps(context, index, all);
            }
        }
        if !is_late(Thread::Daemon) {
            self.daemon_steps(context, all);
        }
    }
}

fn fingerprint(world: &World) -> u64 {
    let mut folding = Folding(0);
    world.hash(&mut folding);
    folding.finish()
}

/// A hasher that does little, as most of the time would go into hashing otherwise.
struct Folding(u64);

impl Hasher for Folding {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_isize(&mut self, number: isize) {
        self.write_u64(number.cast_unsigned() as u64);
    }

    fn write_u64(&mut self, number: u64) {
        let mixed = self.0 ^ number ^ 0x9e37_79b9_7f4a_7c15;
        let (low, high) = mixed.carrying_mul(0xa076_1d64_78bd_642f, 0);
        self.0 = low ^ high;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

fn path(from: &[(usize, (Thread, &'static str))], mut index: usize) -> Vec<(Thread, &'static str)> {
    let mut steps = Vec::new();
    while index != 0 {
        let (before, step) = from[index];
        steps.push(step);
        index = before;
    }
    steps.reverse();
    steps
}
