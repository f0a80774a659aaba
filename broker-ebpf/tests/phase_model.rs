//! An exhaustive search over all interleavings of those who change the word of an origin socket.
//!
//! The word (`broker_ebpf::phase`) says whose a socket is. Four parties change it without a lock:
//! the program in a client's `send()`, the program that sees what an origin sends, the program
//! that sees sockets change their TCP state, and the daemon. Here each of them is a sequence of
//! atomic steps as in the code: reading the word, a compare-and-swap, setting or clearing the idle
//! bit, writing the slot's fields, looking a socket up, handing bytes over, telling the daemon.
//! The explorer visits every state that any order of these steps leads to.
//!
//! # Who takes steps
//!
//! - **Clients** (`client`) send one to three requests, before or after they have read the response
//!   to the one before, and may close or end their side at any time. Their programs run under their
//!   socket's lock: for one client they are a sequence.
//! - **Origins** (`origin`) answer in one or two segments, plain or not, and may send what nobody
//!   asked for, end or reset at any time. Their programs run under their socket's lock, too; looking
//!   into its queue and closing it wait for that.
//! - **The daemon** (`daemon`) hears events, takes exchanges over, takes sockets back, relays, opens
//!   connections and puts them into slots that have become free. It is one thread, so that all it
//!   does is a sequence.
//!
//! # What must hold
//!
//! 1. No client gets bytes of another's response, nor bytes that nobody asked for; each reads its
//!    responses in order, and none twice. What is redirected and what the daemon relays are two
//!    queues without a common order.
//! 2. No socket is lost: once nothing is under way, each is idle with its bit set, or closed; and no client waits.
//! 3. No socket is the kernel's and the daemon's at a time, and nobody's word changes under the
//!    hands of who owns it.
//! 4. Each transition made is one of `phase::allowed`, and each of those is made.
//! 5. Once nothing is under way, the count of exchanges under way is right.
//!
//! One thing is outside of the model: an origin that answers well-formed what nobody asked, and
//! goes on answering. Whoever reuses connections takes that for the next response; HTTP/1.1 cannot
//! tell them apart.
//!
//! A search that finds nothing proves little unless it finds what is known to be wrong: each
//! [`Mistake`] is a way to write the programs a little differently, and must be found out.

mod phase_model {
    pub(crate) mod client;
    pub(crate) mod daemon;
    pub(crate) mod explore;
    pub(crate) mod origin;
    pub(crate) mod world;
}

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::thread;

use broker_ebpf::phase::{Actor, Phase, Word, allowed};

use self::phase_model::explore::{Outcome, explore};
use self::phase_model::world::{Budget, Kind, Mistake, Scenario};

const GET: Kind = Kind::Get;
const HEAD: Kind = Kind::Head;
const ODD: Kind = Kind::Odd;

const NOTHING: Budget = Budget {
    junk: 0,
    surplus: 0,
    goodbye: 0,
    end: 0,
    end_with_data: 0,
    reset: 0,
    close: 0,
    half_close: 0,
    sweeps: 0,
    lookup_fails: 0,
    cut_fails: 0,
    lost: 0,
};

/// Two clients with one request each, and one socket.
const BASE: Scenario = Scenario {
    name: "two clients",
    clients: &[&[GET], &[GET]],
    pipelining: false,
    split: false,
    not_plain: false,
    slots: 1,
    sockets: 1,
    uses: 9,
    impatient: false,
    budget: NOTHING,
    mistakes: &[],
};

/// One client that does not wait for responses, and one socket.
const EAGER: Scenario = Scenario { clients: &[&[GET, GET]], pipelining: true, ..BASE };

const SCENARIOS: &[Scenario] = &[
    Scenario { name: "plain exchanges", clients: &[&[GET, GET], &[GET]], ..BASE },
    Scenario {
        name: "all kinds of responses",
        clients: &[&[GET, GET], &[GET]],
        split: true,
        not_plain: true,
        ..BASE
    },
    Scenario {
        name: "requests for the daemon",
        clients: &[&[GET, ODD], &[GET]],
        split: true,
        ..BASE
    },
    Scenario {
        name: "two sockets",
        clients: &[&[GET, HEAD], &[GET]],
        slots: 2,
        sockets: 2,
        ..BASE
    },
    Scenario {
        name: "sockets for one use",
        clients: &[&[GET, GET], &[GET]],
        uses: 1,
        sockets: 2,
        ..BASE
    },
    Scenario {
        name: "a client that does not wait",
        clients: &[&[GET, GET, GET]],
        split: true,
        not_plain: true,
        ..EAGER
    },
    Scenario {
        name: "a client that does not wait, two sockets",
        clients: &[&[GET, GET, ODD]],
        slots: 2,
        sockets: 2,
        not_plain: true,
        ..EAGER
    },
    Scenario {
        name: "two clients, one does not wait",
        clients: &[&[GET, GET], &[GET]],
        split: true,
        ..EAGER
    },
    Scenario { name: "junk", sockets: 2, budget: Budget { junk: 1, ..NOTHING }, ..BASE },
    Scenario {
        name: "junk for a client that does not wait",
        sockets: 2,
        budget: Budget { junk: 1, ..NOTHING },
        ..EAGER
    },
    Scenario {
        name: "surplus",
        split: true,
        sockets: 2,
        budget: Budget { surplus: 1, ..NOTHING },
        ..BASE
    },
    Scenario {
        name: "surplus that cannot be cut off",
        split: true,
        budget: Budget { surplus: 1, cut_fails: 1, ..NOTHING },
        ..BASE
    },
    Scenario { name: "goodbye", sockets: 2, budget: Budget { goodbye: 1, ..NOTHING }, ..BASE },
    Scenario {
        name: "an origin ends",
        split: true,
        sockets: 2,
        budget: Budget { end: 1, ..NOTHING },
        ..BASE
    },
    Scenario {
        name: "an origin ends with the last bytes",
        split: true,
        budget: Budget { end_with_data: 1, sweeps: 1, ..NOTHING },
        ..BASE
    },
    Scenario {
        name: "an origin resets",
        split: true,
        sockets: 2,
        budget: Budget { reset: 1, ..NOTHING },
        ..BASE
    },
    Scenario {
        name: "an origin ends, its client does not wait",
        split: true,
        budget: Budget { end: 1, ..NOTHING },
        ..EAGER
    },
    Scenario {
        name: "an origin ends with bytes, its client does not wait",
        split: true,
        budget: Budget { end_with_data: 1, ..NOTHING },
        ..EAGER
    },
    Scenario {
        name: "an origin resets, its client does not wait",
        split: true,
        sockets: 2,
        budget: Budget { reset: 1, ..NOTHING },
        ..EAGER
    },
    Scenario {
        name: "a client closes",
        clients: &[&[GET, GET], &[GET]],
        split: true,
        not_plain: true,
        budget: Budget { close: 1, ..NOTHING },
        ..BASE
    },
    Scenario {
        name: "a client ends its side",
        split: true,
        not_plain: true,
        budget: Budget { half_close: 1, ..NOTHING },
        ..BASE
    },
    Scenario {
        name: "a client that does not wait leaves",
        split: true,
        budget: Budget { close: 1, half_close: 1, ..NOTHING },
        ..EAGER
    },
    Scenario {
        name: "slow exchanges",
        clients: &[&[GET, GET], &[ODD]],
        budget: Budget { sweeps: 1, ..NOTHING },
        ..BASE
    },
    Scenario {
        name: "stalled exchanges and expired sockets",
        clients: &[&[GET, GET]],
        impatient: true,
        split: true,
        sockets: 2,
        budget: Budget { sweeps: 2, ..NOTHING },
        ..BASE
    },
    Scenario {
        name: "sockets that are not found",
        slots: 2,
        sockets: 2,
        budget: Budget { lookup_fails: 1, ..NOTHING },
        ..BASE
    },
    Scenario {
        name: "sockets that are not found, a client does not wait",
        clients: &[&[GET, ODD]],
        slots: 2,
        sockets: 2,
        budget: Budget { lookup_fails: 1, ..NOTHING },
        ..EAGER
    },
    Scenario {
        name: "requests that take too long to be sent",
        impatient: true,
        sockets: 2,
        budget: Budget { junk: 1, end: 1, ..NOTHING },
        ..BASE
    },
    Scenario {
        name: "lost events",
        not_plain: true,
        budget: Budget { lost: 1, junk: 1, ..NOTHING },
        ..BASE
    },
];

/// Each with the smallest world that shows it.
const MISTAKES: &[Scenario] = &[
    Scenario {
        name: "owner and phase in two fields",
        sockets: 2,
        budget: Budget { junk: 1, ..NOTHING },
        mistakes: &[Mistake::OwnerApart],
        ..BASE
    },
    Scenario {
        name: "events that are taken at their word",
        sockets: 2,
        budget: Budget { junk: 1, sweeps: 1, ..NOTHING },
        mistakes: &[Mistake::TrustsEvents],
        ..BASE
    },
    Scenario { name: "the owner read anew", mistakes: &[Mistake::OwnerReadAnew], ..BASE },
    Scenario { name: "the bit before the word", mistakes: &[Mistake::BitFirst], ..BASE },
    Scenario {
        name: "the bit alone",
        budget: Budget { junk: 1, ..NOTHING },
        mistakes: &[Mistake::BitOnly],
        ..BASE
    },
    Scenario {
        name: "no phase between idle and head",
        clients: &[&[GET], &[HEAD]],
        sockets: 2,
        budget: Budget { goodbye: 1, ..NOTHING },
        mistakes: &[Mistake::NoClaim],
        ..BASE
    },
    Scenario {
        name: "a slot that is freed under its claimer",
        clients: &[&[GET], &[HEAD]],
        sockets: 2,
        budget: Budget { junk: 1, ..NOTHING },
        mistakes: &[Mistake::ForgetsClaimer],
        ..BASE
    },
    Scenario {
        name: "a request to whatever socket is in the slot",
        impatient: true,
        sockets: 2,
        budget: Budget { reset: 1, ..NOTHING },
        mistakes: &[Mistake::LookupUnchecked],
        ..BASE
    },
    Scenario {
        name: "a request that is sent twice",
        clients: &[&[GET]],
        sockets: 2,
        budget: Budget { reset: 1, ..NOTHING },
        mistakes: &[Mistake::SendsTwice],
        ..BASE
    },
    Scenario {
        name: "a response to a request that was not sent",
        budget: Budget { goodbye: 1, ..NOTHING },
        mistakes: &[Mistake::AnswersUnsent],
        ..BASE
    },
    Scenario {
        name: "a request that is sent after the exchange is handed over",
        clients: &[&[GET]],
        sockets: 2,
        budget: Budget { end: 1, ..NOTHING },
        mistakes: &[Mistake::CountsTooShort],
        ..BASE
    },
    Scenario {
        name: "a request that is on its way when the daemon goes on",
        clients: &[&[GET]],
        sockets: 2,
        budget: Budget { end: 1, ..NOTHING },
        mistakes: &[Mistake::TakesUnsent],
        ..BASE
    },
    Scenario {
        name: "a relayed response before a redirected one",
        not_plain: true,
        mistakes: &[Mistake::Overtakes],
        ..EAGER
    },
    Scenario {
        name: "a message before the event",
        not_plain: true,
        mistakes: &[Mistake::PassesUntold],
        ..EAGER
    },
    Scenario {
        name: "a relayed response after a part of one",
        split: true,
        budget: Budget { end: 1, ..NOTHING },
        mistakes: &[Mistake::LooksAtPhase],
        ..EAGER
    },
    Scenario {
        name: "a response cut off before its end is seen",
        clients: &[&[GET]],
        split: true,
        budget: Budget { end_with_data: 1, sweeps: 1, ..NOTHING },
        mistakes: &[Mistake::CutsAtOnce],
        ..BASE
    },
    Scenario {
        name: "a request between the swap and the bytes",
        clients: &[&[GET, ODD]],
        mistakes: &[Mistake::Window],
        ..EAGER
    },
];

#[test]
fn no_interleaving_breaks_a_rule() {
    let outcomes = explore_all(SCENARIOS);
    let mut states = 0;
    for outcome in &outcomes {
        eprintln!("{:7} states: {}", outcome.states, outcome.name);
        states += outcome.states;
        if let Some(found) = &outcome.violation {
            panic!("{}: {found}", outcome.name);
        }
    }
    eprintln!("{states:7} states");
    let made: BTreeSet<_> = outcomes.into_iter().flat_map(|outcome| outcome.made).collect();
    let never: Vec<_> =
        transitions().filter(|&(actor, from, to)| !made.contains(&key(actor, from, to))).collect();
    assert!(never.is_empty(), "allowed, but never made: {never:?}");
}

#[test]
fn each_mistake_is_found() {
    for outcome in explore_all(MISTAKES) {
        let Some(found) = outcome.violation else {
            panic!("{}: nothing found in {} states", outcome.name, outcome.states);
        };
        eprintln!("{} ({} states): {found}", outcome.name, outcome.states);
    }
}

/// All transitions that are allowed, between words that there are.
fn transitions() -> impl Iterator<Item = (Actor, Word, Word)> {
    let words =
        || (0..=Phase::Dirty as u8).flat_map(|n| [0, 1].map(|o| Word::new(Phase::from_u8(n), o)));
    [Actor::Daemon, Actor::Request, Actor::Response, Actor::Close]
        .into_iter()
        .flat_map(move |actor| words().map(move |from| (actor, from)))
        .flat_map(move |(actor, from)| words().map(move |to| (actor, from, to)))
        .filter(|&(actor, from, to)| allowed(actor, from, to))
        .filter(|(_, from, _)| !from.phase().is_steered() || from.owner() != 0)
}

/// How a transition is noted: see `Context::made`.
fn key(actor: Actor, from: Word, to: Word) -> (u8, Phase, Phase, bool) {
    (actor as u8, from.phase(), to.phase(), to.owner() == 0)
}

/// Explores scenarios, two at a time.
fn explore_all(scenarios: &'static [Scenario]) -> Vec<Outcome> {
    let (left, outcomes) = (Mutex::new(scenarios.iter()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some(scenario) = next else { break };
                    let outcome = explore(scenario);
                    outcomes.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
                }
            });
        }
    });
    outcomes.into_inner().unwrap_or_else(PoisonError::into_inner)
}
