//! What the experiments measure with.

/// Lets the spin locks (the core's own, the baselines have no other) give up the CPU after a while:
/// there may be more threads than CPUs.
pub(crate) fn use_yield() {
    static HOOK: fn() = std::thread::yield_now;
    swaptide_core::set_yield(&HOOK);
}

/// Seconds of CPU that this thread has used: what other programs take meanwhile does not show.
pub(crate) fn cpu_seconds() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// The median of `values`; 0 when there are none.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_and_none() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(vec![]), 0.0);
    }
}
