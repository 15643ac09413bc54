//! Long random histories of all operations against a plain map of slots.
#![cfg(not(loom))]

mod history;

use history::{Op, Pair};
use proptest::prelude::*;
use swaptide_core::Kind;

fn op() -> impl Strategy<Value = Op> {
    let n = || prop_oneof![4 => Just(1u32), 4 => Just(16), 1 => 1..40u32, 1 => Just(512)];
    let at = || any::<prop::sample::Index>().prop_map(|i| i.index(1 << 20));
    prop_oneof![
        8 => (0..3u16, 0..=9u8, 0..6u32, 0..3u16)
            .prop_map(|(cpu, order, folio, group)| Op::Alloc { cpu, order, folio, group }),
        4 => (0..3u16, 0..=4u8, 0..6u32, 0..3u16)
            .prop_map(|(cpu, order, folio, group)| Op::Alloc { cpu, order, folio, group }),
        5 => (at(), n(), any::<u32>(), any::<u64>())
            .prop_map(|(at, n, shadow, zero)| Op::ToShadow { at, n, shadow, zero }),
        4 => (at(), n(), 0..6u32).prop_map(|(at, n, folio)| Op::ToFolio { at, n, folio }),
        1 => (at(), n(), 0..6u32).prop_map(|(at, n, to)| Op::Replace { at, n, to }),
        2 => (at(), n(), prop_oneof![3 => Just(1u32), 1 => Just(130)])
            .prop_map(|(at, n, times)| Op::Dup { at, n, times }),
        6 => (at(), n(), prop_oneof![3 => Just(1u32), 1 => Just(130)])
            .prop_map(|(at, n, times)| Op::Put { at, n, times }),
        6 => (at(), n(), 0..3u8).prop_map(|(at, n, expect)| Op::Free { at, n, expect }),
        3 => (at(), n()).prop_map(|(at, n)| Op::Release { at, n }),
        1 => (at(), n(), any::<bool>()).prop_map(|(at, n, zero)| Op::Zero { at, n, zero }),
        1 => Just(Op::Discard),
        1 => (1000..5000u32).prop_map(|limit| Op::Limit { limit }),
        1 => (0..4u32).prop_map(|keep| Op::Drain { keep }),
        2 => (
            prop_oneof![Just(u32::MAX), 1..300u32],
            any::<bool>(),
            prop_oneof![3 => Just(0u32), 1 => 2..40u32]
        )
            .prop_map(|(max, tear, refuse)| Op::Compact { max, tear, refuse }),
        1 => prop_oneof![Just(4096u32), 1..4096u32].prop_map(|room| Op::Swapoff { room }),
    ]
}

/// 48 histories, or as many as PROPTEST_CASES says.
fn config() -> ProptestConfig {
    let told = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { told.cases } else { 48 };
    ProptestConfig { cases, max_shrink_iters: 2000, ..told }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_device_is_a_map(
        slots in prop_oneof![Just(4096u32), Just(4000), Just(1100)],
        discard in any::<bool>(),
        rotational in any::<bool>(),
        ops in prop::collection::vec(op(), 1..600),
    ) {
        let mut pair =
            Pair::new(slots, discard, if rotational { Kind::Rotational } else { Kind::Solid });
        for (i, op) in ops.into_iter().enumerate() {
            pair.apply(op);
            if i % 16 == 0 {
                pair.check();
            }
        }
        pair.check();
    }
}
