//! Texts that change tiers and masks: all or nothing, and every priority has one tier.
#![no_main]

use libfuzzer_sys::fuzz_target;
use swaptide_core::{Priority, TierMask, Tiers};

/// Each priority is in the one tier whose range holds it, and the ranges touch.
fn check(tiers: &Tiers) {
    let mut next = Priority::MAX.get();
    for tier in tiers.iter() {
        assert!(tier.start <= tier.end && tier.end.get() == next, "{tiers:?}");
        assert_eq!(tiers.tier_of(tier.start), Some(tier.index));
        assert_eq!(tiers.find(tier.name), Some(tier.index));
        next = tier.start.get() - 1;
    }
    assert!(tiers.is_empty() || next == Priority::MIN.get() - 1, "{tiers:?} leaves priorities out");
    let mut again = Tiers::new();
    again.apply(&tiers.spec(), &[]).expect("what tiers say of themselves makes them");
    assert_eq!(
        again.iter().map(|tier| (tier.name.to_owned(), tier.start)).collect::<Vec<_>>(),
        tiers.iter().map(|tier| (tier.name.to_owned(), tier.start)).collect::<Vec<_>>()
    );
}

// Lines: `=` replaces the tiers, `@` changes the mask, `#` adds a device, others change the tiers.
fuzz_target!(|text: &str| {
    let (mut tiers, mut mask, mut devices) = (Tiers::new(), TierMask::ALL, Vec::new());
    for line in text.lines().take(64) {
        let before = (tiers, mask);
        let names: Vec<Option<String>> =
            devices.iter().map(|device| name_of(&tiers, *device)).collect();
        let done = match line.as_bytes().first() {
            Some(b'=') => {
                tiers.replace(&line[1..], &devices).map(|applied| mask.forget(applied.freed))
            }
            Some(b'@') => mask.apply(&line[1..], &tiers),
            Some(b'#') => {
                devices.extend(line[1..].parse().ok().and_then(Priority::new));
                devices.truncate(8);
                continue;
            }
            _ => tiers.apply(line, &devices).map(|applied| mask.forget(applied.freed)),
        };
        match done {
            Ok(()) => {
                check(&tiers);
                let after = devices.iter().map(|device| name_of(&tiers, *device));
                for (device, (old, new)) in devices.iter().zip(names.into_iter().zip(after)) {
                    assert!(
                        old.is_none() || old == new,
                        "the device of {device} went from {old:?} to {new:?}"
                    );
                }
            }
            Err(error) => {
                assert_eq!(before, (tiers, mask), "refused, and changed: {error}");
                assert!(!error.to_string().contains('\n'));
            }
        }
        assert!(mask.permits(None), "devices in no tier are never excluded");
        for device in &devices {
            assert_eq!(
                mask.permits_priority(&tiers, *device),
                mask.permits(tiers.tier_of(*device))
            );
        }
        let _ = mask.names(&tiers);
    }
});

fn name_of(tiers: &Tiers, device: Priority) -> Option<String> {
    let index = tiers.tier_of(device)?;
    tiers.iter().find(|tier| tier.index == index).map(|tier| tier.name.to_owned())
}
