use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rand::SeedableRng;

use super::super::State;
use super::super::tests::{settings, tcp};
use super::*;

const INTERVAL: Duration = Duration::from_secs(5);

/// Checks that end as they are told, and what has become of them.
#[derive(Clone)]
struct Script(Arc<Inner>);

struct Inner {
    takes: Duration,
    outcome: Mutex<Option<Outcome>>,
    /// When each check began, whose it was, and how many were made with what it was given.
    begun: Mutex<Vec<(Instant, SocketAddr, usize)>>,
    running: AtomicUsize,
    most: AtomicUsize,
}

impl Script {
    fn new(takes: Duration) -> Self {
        Self(Arc::new(Inner {
            takes,
            outcome: Mutex::new(Some(Outcome::Passed)),
            begun: Mutex::default(),
            running: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
        }))
    }

    /// From now on checks end so; `None`: they panic.
    fn ends(&self, outcome: Option<Outcome>) {
        *self.0.outcome.lock().expect("outcome") = outcome;
    }

    fn begun(&self) -> Vec<(Instant, SocketAddr, usize)> {
        self.0.begun.lock().expect("log").clone()
    }
}

struct Running(Arc<Inner>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Relaxed);
    }
}

impl Probe for Script {
    type Kept = usize;

    fn check(
        &self,
        origin: SocketAddr,
        kept: Option<usize>,
    ) -> impl Future<Output = (Outcome, Option<usize>)> + Send + 'static {
        let inner = Arc::clone(&self.0);
        let used = kept.unwrap_or(0);
        async move {
            inner.begun.lock().expect("log").push((clock::now(), origin, used));
            inner.most.fetch_max(inner.running.fetch_add(1, Relaxed) + 1, Relaxed);
            let running = Running(inner);
            tokio::time::sleep(running.0.takes).await;
            let outcome = running.0.outcome.lock().expect("outcome").clone();
            (outcome.expect("an outcome"), Some(used + 1))
        }
    }
}

struct Setup {
    script: Script,
    list: watch::Sender<Arc<[SocketAddr]>>,
    checks: watch::Receiver<Arc<Checks>>,
}

fn origin(n: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 1 + n))
}

fn start(origins: impl IntoIterator<Item = u16>, takes: Duration) -> Setup {
    let script = Script::new(takes);
    let (list, reader) = watch::channel(origins.into_iter().map(origin).collect());
    let settings =
        HealthCheck { interval: INTERVAL, unhealthy_interval: INTERVAL, ..settings(tcp()) };
    let rng = StdRng::seed_from_u64(3);
    let checks = Schedule::start(settings, reader, script.clone(), rng);
    Setup { script, list, checks }
}

async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

#[tokio::test(start_paused = true)]
async fn a_thousand_origins_are_spread_over_the_interval() {
    let start = start(0..1000, Duration::ZERO);
    let began = clock::now();
    pass(Duration::from_secs(1)).await;
    let known = start.checks.borrow().values().filter(|c| c.state == State::Healthy).count();
    assert_eq!(known, 1000, "the first checks are made at once");
    pass(Duration::from_secs(30)).await;
    let mut slots = [0; 10];
    for (at, ..) in start.script.begun() {
        let window = began + INTERVAL * 4..began + INTERVAL * 5;
        if window.contains(&at) {
            let slot = (at - window.start).as_millis() / (INTERVAL.as_millis() / 10);
            slots[usize::try_from(slot).expect("a slot")] += 1;
        }
    }
    assert!(slots.iter().all(|n| (50..=150).contains(n)), "{slots:?}");
    let checks = start.checks.borrow().values().map(|c| c.checks).sum::<u64>();
    assert!((6000..=8000).contains(&checks), "{checks}");
}

#[tokio::test(start_paused = true)]
async fn a_thousand_silent_origins_are_checked_in_time() {
    let start = start(0..1000, Duration::from_secs(1));
    start.script.ends(Some(Outcome::TimedOut));
    pass(Duration::from_secs(5)).await;
    let known = start.checks.borrow().values().filter(|c| c.state == State::Unhealthy).count();
    assert_eq!(known, 1000);
    pass(Duration::from_mins(1)).await;
    assert!(start.script.0.most.load(Relaxed) <= AT_ONCE_MAX);
    let mut times = BTreeMap::<_, Vec<_>>::new();
    for (at, origin, _) in start.script.begun() {
        times.entry(origin).or_default().push(at);
    }
    // The first ones wait for each other.
    let late = |t: &[Instant]| t[1] - t[0] > INTERVAL.mul_f64(1.3);
    for times in times.values() {
        assert!(times.len() > 8 && !times.windows(2).skip(2).any(late), "{times:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn lists_are_followed() {
    let start = start([1, 2], Duration::from_secs(1));
    let known = || {
        let checks = start.checks.borrow();
        checks.iter().map(|(&address, c)| (address, c.state)).collect::<Vec<_>>()
    };
    pass(Duration::from_millis(1500)).await;
    assert_eq!(known(), [(origin(1), State::Healthy), (origin(2), State::Healthy)]);

    let (list, mut told) = (Arc::from([origin(1), origin(3)]), start.checks.clone());
    told.mark_unchanged();
    start.list.send_replace(Arc::clone(&list));
    told.changed().await.expect("a change");
    start.list.send_replace(list);
    assert!(tokio::time::timeout(TELL_STATES, told.changed()).await.is_err(), "the same list");
    pass(Duration::from_millis(500)).await;
    assert_eq!(known(), [(origin(1), State::Healthy), (origin(3), State::Unknown)]);
    let asked = start.script.begun();
    assert!(asked.iter().any(|(_, o, _)| *o == origin(3)), "at once");

    // In the middle of its check; and back before that would have ended.
    start.list.send_replace([origin(1)].into());
    pass(Duration::from_millis(1)).await;
    start.list.send_replace([origin(1), origin(3)].into());
    pass(Duration::from_millis(700)).await;
    assert_eq!(known()[1], (origin(3), State::Unknown), "the check before does not count");
    pass(Duration::from_millis(500)).await;
    assert_eq!(known()[1], (origin(3), State::Healthy));

    start.list.send_replace(Arc::from([]));
    pass(Duration::from_millis(100)).await;
    assert_eq!(known(), []);
    assert_eq!(start.script.0.running.load(Relaxed), 0);
    let before = start.script.begun().len();
    pass(INTERVAL * 10).await;
    assert_eq!(start.script.begun().len(), before);
}

#[tokio::test(start_paused = true)]
async fn checks_outlive_whoever_made_the_list() {
    let Setup { script, list, checks } = start([1], Duration::ZERO);
    drop(list);
    pass(INTERVAL * 10).await;
    assert!(checks.borrow()[&origin(1)].checks >= 9);
    drop(checks);
    pass(INTERVAL).await;
    let before = script.begun().len();
    pass(INTERVAL * 10).await;
    assert_eq!(script.begun().len(), before, "nobody wants to know");
}

#[tokio::test(start_paused = true)]
async fn what_a_check_leaves_is_for_the_next_one() {
    let start = start([1, 2], Duration::ZERO);
    pass(INTERVAL * 4).await;
    for n in [1, 2] {
        let begun = start.script.begun();
        let used: Vec<_> = begun.iter().filter(|b| b.1 == origin(n)).map(|b| b.2).collect();
        assert!(used.len() > 3 && used.iter().copied().eq(0..used.len()), "{used:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_check_that_panics_is_one_that_was_not_made() {
    let start = start([1], Duration::ZERO);
    start.script.ends(None);
    pass(INTERVAL).await;
    let checked = start.checks.borrow()[&origin(1)].clone();
    assert_eq!((checked.state, checked.checks), (State::Unknown, 0));
    assert!(checked.last_error.expect("an error").contains("panicked"));
    start.script.ends(Some(Outcome::Passed));
    pass(INTERVAL * 2).await;
    assert_eq!(start.checks.borrow()[&origin(1)].state, State::Healthy);
}

#[tokio::test(start_paused = true)]
async fn states_are_told_at_once_and_counts_together() {
    let mut start = start(0..100, Duration::ZERO);
    let mut told = async |time: Duration| {
        let end = tokio::time::Instant::now() + time;
        let mut told = 0;
        while let Ok(Ok(())) = tokio::time::timeout_at(end, start.checks.changed()).await {
            start.checks.borrow_and_update();
            told += 1;
        }
        told
    };
    assert_eq!(told(TELL_STATES * 2).await, 1, "a hundred states");
    let counts = told(INTERVAL * 4).await;
    assert!((15..=20).contains(&counts), "once a second: {counts}");
    start.script.ends(Some(Outcome::Status { status: 500, retriable: false }));
    start.checks.borrow_and_update();
    let failed = tokio::time::timeout(
        INTERVAL * 2,
        start.checks.wait_for(|checks| checks.values().all(|c| c.state == State::Unhealthy)),
    );
    assert!(failed.await.is_ok());
}
