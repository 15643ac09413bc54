//! Medians, ratios, and the JSON's shape.

use super::*;
use crate::workload::phases::{PageContent, Phase};

fn side(median: f64, limit: u64, pool: u64) -> Side {
    let stats = Spread { median, min: median - 1.0, max: median + 1.0 };
    Side {
        stats,
        limit,
        pool,
        resident: None,
        pool_inside: false,
        detail: String::new(),
        written: 0,
        failed: 0,
    }
}

fn report(better: Better, pairs: Vec<Pairing>) -> BenchReport {
    BenchReport {
        name: "seq".into(),
        title: "1G of data in 256M".into(),
        unit: if better == Better::Higher { "MB/s" } else { "s" }.into(),
        better,
        budget: 256 << 20,
        data: 1 << 30,
        runs: 3,
        unpaired: Unpaired::default(),
        pairs,
        rows: Rows::default(),
        machine: json!({"kernel": "6.18"}),
        notes: vec!["a note".into()],
        failed: vec![],
    }
}

fn pair(name: &str, peer: f64, ours: f64) -> Pairing {
    let other = Some(Side { detail: "lz4 64K".into(), ..side(peer - 10.0, 256 << 20, 200 << 20) });
    Pairing {
        name: name.into(),
        peer: side(peer, 256 << 20, 207 << 20),
        other,
        absent: None,
        swaptide: side(ours, 463 << 20, 180 << 20),
    }
}

#[test]
fn median_of_odd_even_one_and_none() {
    assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
    assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
    assert_eq!(Spread::of(&[7.0]), Some(Spread { median: 7.0, min: 7.0, max: 7.0 }));
    assert_eq!(Spread::of(&[]), None);
}

#[test]
fn json_has_the_keys_of_the_contract() {
    let json = report(
        Better::Higher,
        vec![pair("kernel-file", 300.0, 900.0), pair("kernel-zram", 500.0, 1500.0)],
    )
    .json();
    assert_eq!(json["name"], "seq");
    assert_eq!(json["unit"], "MB/s");
    assert_eq!(json["better"], "higher");
    assert_eq!(json["budget_bytes"], 256 << 20);
    assert_eq!(json["data_bytes"], 1 << 30);
    assert_eq!(json["runs"], 3);
    assert_eq!(json["swaptide"]["median"], 1500.0);
    assert_eq!(json["swaptide"]["min"], 1499.0);
    assert_eq!(json["swaptide"]["max"], 1501.0);
    assert_eq!(json["peers"]["kernel-zram"]["median"], 500.0);
    assert_eq!(json["peers"]["kernel-zram"]["total_bytes"], 463 << 20);
    assert_eq!(json["peers"]["kernel-file"]["ratio"], 3.0);
    assert_eq!(json["peers"]["kernel-zram"]["other"]["detail"], "lz4 64K");
    assert_eq!(json["best_peer"], "kernel-zram");
    assert_eq!(json["ratio_to_best_peer"], 3.0);
}

#[test]
fn less_is_better_turns_the_ratio_round() {
    let report = report(Better::Lower, vec![pair("slow", 4.0, 2.1), pair("fast", 2.0, 2.5)]);
    let json = report.json();
    assert_eq!(json["best_peer"], "fast");
    assert_eq!(json["ratio_to_best_peer"], 0.8);
    assert_eq!(json["swaptide"]["median"], 2.5);
    assert!(report.text().contains("ratio to fast: 0.800"));
}

#[test]
fn without_a_peer_swaptide_stands_alone() {
    let mut report = report(Better::Higher, vec![]);
    report.unpaired.usual =
        Some(Side { resident: Some(250 << 20), ..side(900.0, 256 << 20, 100 << 20) });
    let json = report.json();
    assert_eq!(json["swaptide"]["median"], 900.0);
    assert_eq!(json["swaptide"]["total_bytes"], 250 << 20);
    assert!(json["ratio_to_best_peer"].is_null());
    assert!(json["peers"].as_object().unwrap().is_empty());
    let text = report.text();
    let row = text.lines().find(|l| l.starts_with("swaptide --ram 256M")).unwrap();
    assert!(row.ends_with("150M    100M    250M"), "{row:?}");
    assert!(text.ends_with("note: a note\n"));
}

#[test]
fn the_table_shows_both_totals() {
    let text = report(Better::Higher, vec![pair("kernel-zram", 500.0, 1500.0)]).text();
    let row = |start: &str| {
        text.lines().find(|l| l.starts_with(start)).unwrap_or_else(|| panic!("{start}: {text}"))
    };
    assert!(row("kernel-zram (the better)").ends_with("256M    207M    463M"));
    assert!(row("kernel-zram lz4 64K").ends_with("256M    200M    456M"));
    assert!(row("swaptide --ram 463M").contains("1500"));
    assert!(text.contains("ratio to kernel-zram: 3.000"));
}

#[test]
fn bytes_are_short_and_right() {
    for (bytes, text) in [
        (0, "0"),
        (1023, "1023"),
        (1024, "1K"),
        (463 << 20, "463M"),
        (3 << 29, "1.50G"),
        (1 << 31, "2G"),
    ] {
        assert_eq!(human(bytes), text);
    }
}

#[test]
fn a_sweep_lists_its_points_and_what_was_not_measured_is_null() {
    let mut report = report(Better::Higher, vec![]);
    let point = |name: &str, speed, limit: u64, capped| Point {
        name: name.into(),
        content: PageContent::Two,
        budget: limit,
        side: Side { pool_inside: name == SWAPTIDE, ..side(speed, limit, 50 << 20) },
        phases: vec![(Phase::Fill, 500.0), (Phase::Seq, 250.0)],
        wall_s: 12.5,
        verified: 3 << 20,
        capped,
        against: (name == SWAPTIDE).then(|| ("kernel-file".to_owned(), 1.5)),
    };
    report.rows.points =
        vec![point(SWAPTIDE, 300.0, 64 << 20, true), point("kernel-zram", 200.0, 64 << 20, false)];
    let json = report.json();
    let points = json["points"].as_array().unwrap();
    assert_eq!(
        (&points[0]["side"], &points[0]["median"], &points[0]["capped"]),
        (&json!("swaptide"), &json!(300.0), &json!(true))
    );
    assert!(points[0]["total_bytes"].is_null(), "swaptide's total is measured or unknown");
    assert_eq!(points[1]["total_bytes"], 114 << 20);
    assert_eq!(
        (&points[0]["phases"]["seq"], &points[0]["data_ratio"]),
        (&json!(250.0), &json!("2"))
    );
    assert_eq!(
        (&points[0]["ratio_to_peer"], &points[0]["peak_over_budget"]),
        (&json!(1.5), &Value::Null)
    );
    report.rows.points[0].side.resident = Some(65 << 20);
    assert_eq!(report.json()["points"][0]["peak_over_budget"], 1.0156);
    let text = report.text();
    // zswap in cgroup version 2 pays for its pool.
    let inside = Side { pool_inside: true, ..side(1.0, 64 << 20, 50 << 20) };
    assert_eq!(inside.total(false), Some(64 << 20));
    for part in [
        "like a heap",
        "swaptide 64M",
        "kernel-zram 64M + pool 50M",
        "1.016  1.50 x kernel-file  cut short (3M checked)",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
