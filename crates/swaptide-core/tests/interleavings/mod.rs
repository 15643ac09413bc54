//! How all loom models are run.

/// Runs a model in every interleaving, and gives how many there were.
///
/// # Panics
/// Where the model does.
pub fn all_of(run: impl Fn() + Sync + Send + 'static) -> usize {
    let mut builder = loom::model::Builder::new();
    // Switches that no thread asks for: more of them only repeat, and take hours.
    builder.preemption_bound = Some(3);
    // A device of two slots is long to walk.
    builder.max_branches = 10_000;
    let runs = std::sync::atomic::AtomicUsize::new(0);
    let runs: &'static std::sync::atomic::AtomicUsize = Box::leak(Box::new(runs));
    builder.check(move || {
        runs.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        run();
    });
    let runs = runs.load(std::sync::atomic::Ordering::Relaxed);
    println!("{runs} interleavings");
    runs
}
