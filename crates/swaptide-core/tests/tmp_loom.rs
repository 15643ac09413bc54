#![cfg(loom)]
use loom::sync::atomic::*; use loom::sync::Arc;
#[test] fn x() {
    for boxed in [false, true] {
    let runs: &'static std::sync::atomic::AtomicUsize = Box::leak(Box::new(Default::default()));
    loom::model(move || {
        runs.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let a = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
        let b = a.clone();
        let t = loom::thread::spawn(move || { b.0.store(1, Ordering::Release); b.1.store(1, Ordering::Release); });
        let _ = boxed;
        let (x,y)=(a.1.load(Ordering::Acquire), a.0.load(Ordering::Acquire));
        println!("{x}{y}");
        t.join().unwrap();
    });
    println!("runs {runs:?}");
    }
}
