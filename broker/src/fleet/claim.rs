//! Which index to take, given who holds which: pure.
//!
//! A registry has a key for each index that is taken; it exists as long as its holder's lease does.
//! Whatever is decided here is done in a transaction that fails if the registry has changed
//! meanwhile, so two gateways never hold the same key.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::config::gateway::GATEWAYS_MAX;

/// Who holds an index, as the registry has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The gateway's name, the same after a restart.
    pub name: String,
    /// The running process: another one after a restart.
    pub instance: String,
}

/// A key of the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Who holds it; `None` if that cannot be read, which is nobody we know.
    pub holder: Option<Holder>,
    /// The lease that it ends with.
    pub lease: i64,
    /// What the registry counts when it changes.
    pub revision: i64,
}

/// All indices that are taken.
pub type Holders = BTreeMap<u32, Entry>;

/// Which index is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The lowest that is free.
    Lowest,
    /// This one.
    Index(u32),
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing: the key is there, under our lease.
    Held(u32),
    /// Make the key of an index that is free.
    Create(u32),
    /// Make a key ours that is at this revision: our own under an old lease, or one of the process
    /// that we have replaced.
    Replace(u32, i64),
    /// Somebody else has the one index that would do.
    Blocked(u32),
    /// All of them are taken.
    Full,
}

/// Decides for `me`, which holds or has held `held` (`None` before the first time) and whose lease
/// is `lease`. `ahead` others wait for the lowest index that is free: they get one each before it.
///
/// The index that was held is kept if it can be. Another process of our name is replaced only
/// before that: it is then the one that ran before us. Later it is a second gateway with our name,
/// and two such must not take the index from each other for ever.
#[must_use]
pub fn step(
    want: Want,
    me: &Holder,
    held: Option<u32>,
    lease: i64,
    holders: &Holders,
    ahead: usize,
) -> Step {
    let wanted = |index: u32| want == Want::Lowest || want == Want::Index(index);
    let mut candidates = holders.iter().filter(|(index, _)| wanted(**index));
    let ours = candidates.clone().find(|(_, entry)| entry.holder.as_ref() == Some(me));
    if let Some((&index, entry)) = ours {
        let replace = Step::Replace(index, entry.revision);
        return if entry.lease == lease { Step::Held(index) } else { replace };
    }
    if held.is_none() {
        let named = |entry: &Entry| entry.holder.as_ref().is_some_and(|h| h.name == me.name);
        if let Some((&index, entry)) = candidates.find(|(_, entry)| named(entry)) {
            return Step::Replace(index, entry.revision);
        }
    }
    let free = |index: &u32| !holders.contains_key(index);
    match want {
        Want::Index(index) if free(&index) => Step::Create(index),
        Want::Index(index) => Step::Blocked(index),
        Want::Lowest => {
            match held.filter(free).or_else(|| (0..GATEWAYS_MAX).filter(free).nth(ahead)) {
                Some(index) => Step::Create(index),
                None => Step::Full,
            }
        }
    }
}

/// How many positions the fleet has: the highest index plus one.
#[must_use]
pub fn gateways(held: u32, holders: &Holders) -> u32 {
    holders.keys().next_back().map_or(held, |&last| last.max(held)) + 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gateway(name: &str, instance: &str) -> Holder {
        Holder { name: name.into(), instance: instance.into() }
    }

    fn holders(all: &[(u32, &str, &str, i64)]) -> Holders {
        let entry = |&(index, name, instance, lease): &(u32, &str, &str, i64)| {
            let holder = Some(gateway(name, instance));
            (index, Entry { holder, lease, revision: 100 + i64::from(index) })
        };
        all.iter().map(entry).collect()
    }

    fn check(want: Want, held: Option<u32>, taken: &[(u32, &str, &str, i64)], expected: Step) {
        let step = step(want, &gateway("me", "now"), held, 5, &holders(taken), 0);
        assert_eq!(step, expected, "{want:?} {held:?} {taken:?}");
    }

    #[test]
    fn the_lowest_free_one() {
        check(Want::Lowest, None, &[], Step::Create(0));
        check(Want::Lowest, None, &[(0, "a", "1", 1), (2, "c", "1", 3)], Step::Create(1));
        check(Want::Lowest, None, &[(0, "a", "1", 1), (1, "c", "1", 3)], Step::Create(2));
    }

    #[test]
    fn those_who_wait_get_one_each() {
        let taken = holders(&[(0, "a", "1", 1), (2, "c", "1", 3)]);
        let me = gateway("me", "now");
        let ahead = |n| step(Want::Lowest, &me, None, 5, &taken, n);
        assert_eq!([0, 1, 2].map(ahead), [1, 3, 4].map(Step::Create));
        assert_eq!(step(Want::Lowest, &me, Some(1), 5, &taken, 2), Step::Create(1));
    }

    #[test]
    fn a_restarted_gateway_gets_its_index_back() {
        check(Want::Lowest, None, &[(3, "me", "before", 1)], Step::Replace(3, 103));
        check(Want::Index(3), None, &[(3, "me", "before", 1)], Step::Replace(3, 103));
        check(Want::Index(2), None, &[(3, "me", "before", 1)], Step::Create(2));
    }

    #[test]
    fn what_was_held_is_kept() {
        check(Want::Lowest, Some(3), &[(3, "me", "now", 5)], Step::Held(3));
        check(Want::Lowest, Some(3), &[(3, "me", "now", 4)], Step::Replace(3, 103));
        check(Want::Lowest, Some(3), &[], Step::Create(3));
        check(Want::Lowest, Some(1), &[(1, "other", "1", 1)], Step::Create(0));
        check(Want::Index(1), Some(1), &[(1, "other", "1", 1)], Step::Blocked(1));
    }

    #[test]
    fn two_of_one_name_do_not_fight() {
        check(Want::Lowest, Some(0), &[(0, "me", "twin", 1)], Step::Create(1));
        check(Want::Index(0), Some(0), &[(0, "me", "twin", 1)], Step::Blocked(0));
    }

    #[test]
    fn an_unreadable_holder_is_a_stranger() {
        let entry = Entry { holder: None, lease: 1, revision: 1 };
        let taken = Holders::from([(0, entry)]);
        assert_eq!(step(Want::Lowest, &gateway("me", "1"), None, 5, &taken, 0), Step::Create(1));
    }

    #[test]
    fn positions_are_indices() {
        assert_eq!(gateways(0, &holders(&[])), 1);
        assert_eq!(gateways(1, &holders(&[(0, "a", "1", 1), (7, "b", "1", 1)])), 8);
        assert_eq!(gateways(9, &holders(&[(0, "a", "1", 1)])), 10);
    }

    proptest! {
        /// Gateways come, go without a word, and are restarted in any order, each doing what `step`
        /// says: no two ever hold one index, and the indices are as dense as they can be when
        /// nobody is away.
        #[test]
        fn never_two_holders(events in prop::collection::vec((0..3_u8, 0..6_usize), 1..60)) {
            let mut registry = Holders::new();
            // Instance, held index.
            let mut running: [Option<(usize, Option<u32>)>; 6] = [None; 6];
            for (time, (event, who)) in events.into_iter().enumerate() {
                match event {
                    // Starts; if it ran, it is restarted while its key is still there.
                    0 => running[who] = Some((time, None)),
                    // Vanishes, and its lease ends.
                    1 => {
                        running[who] = None;
                        let name = who.to_string();
                        registry.retain(|_, e| e.holder.as_ref().is_some_and(|h| h.name != name));
                    }
                    // Its key is lost, though it runs.
                    _ => if let Some((_, Some(held))) = running[who] {
                        registry.remove(&held);
                    },
                }
                for (who, state) in running.iter_mut().enumerate() {
                    let Some((instance, held)) = state else { continue };
                    let me = gateway(&who.to_string(), &instance.to_string());
                    let lease = i64::try_from(*instance).unwrap();
                    match step(Want::Lowest, &me, *held, lease, &registry, 0) {
                        Step::Held(index) => prop_assert_eq!(Some(index), *held),
                        Step::Create(index) => {
                            prop_assert!(!registry.contains_key(&index));
                            let entry = Entry { holder: Some(me), lease, revision: lease };
                            registry.insert(index, entry);
                            *held = Some(index);
                        }
                        Step::Replace(index, revision) => {
                            let entry = registry.get_mut(&index).unwrap();
                            prop_assert_eq!(entry.revision, revision);
                            let before = entry.holder.replace(me.clone()).unwrap();
                            prop_assert_eq!(before.name, me.name);
                            entry.lease = lease;
                            *held = Some(index);
                        }
                        other => prop_assert!(false, "{:?}", other),
                    }
                }
                let mut indices: Vec<_> = running.iter().flatten().filter_map(|s| s.1).collect();
                let count = indices.len();
                indices.sort_unstable();
                indices.dedup();
                prop_assert_eq!(indices.len(), count, "two with one index");
                prop_assert_eq!(registry.len(), count);
            }
        }
    }
}
