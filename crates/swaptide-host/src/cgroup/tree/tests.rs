use super::*;
use crate::testing::segment;

fn path(text: &str) -> GroupPath {
    GroupPath::parse(text).expect("path")
}

fn groups(paths: &[&str]) -> GroupTree {
    let mut groups = GroupTree::new(segment(), 1 << 30);
    for text in paths {
        groups.ensure(&path(text), 1000).expect("group");
    }
    groups
}

fn value(groups: &GroupTree, group: &str, key: &str) -> String {
    groups.view(groups.find(&path(group)).expect("group")).values[key].clone()
}

#[test]
fn groups_are_made_with_all_above_them_and_found_by_cgroup() {
    let groups = groups(&["/web/front", "/batch"]);
    let paths: Vec<String> = groups.iter().map(|(_, group)| group.path.to_string()).collect();
    assert_eq!(paths, ["/", "/batch", "/web", "/web/front"]);
    let of = |cgroup: &str| groups.get(groups.of_cgroup(cgroup)).expect("group").path.to_string();
    assert_eq!(
        ["/", "/web", "/web/front/x/y", "/web/back", "/webmail", "/batch/1"].map(of),
        ["/", "/web", "/web/front", "/web", "/", "/batch"]
    );
    assert_eq!(groups.get(groups.find(&path("/web")).expect("group")).expect("group").owner, 1000);
}

#[test]
fn there_are_only_so_many_and_a_refusal_makes_none() {
    let mut groups = groups(&[]);
    for number in 1..MAX_GROUPS - 1 {
        groups.ensure(&path(&format!("/g{number}")), 0).expect("group");
    }
    assert!(matches!(groups.ensure(&path("/a/b"), 0), Err(GroupError::Full(_))));
    assert!(groups.find(&path("/a")).is_err());
    groups.ensure(&path("/a"), 0).expect("the last one");
    groups.remove(&path("/g7")).expect("empty");
    let index = groups.ensure(&path("/a/b"), 0).expect("its place is free");
    assert_eq!(index, GroupIndex(7));
    assert_eq!(groups.segment.ancestry(index).count(), 3);
}

#[test]
fn only_empty_group_removed_events_kept() {
    let mut groups = groups(&["/web/front"]);
    let refused = |groups: &mut GroupTree, text: &str| {
        groups.remove(&path(text)).expect_err("refused").to_string()
    };
    assert!(refused(&mut groups, "/").contains("root"));
    assert!(refused(&mut groups, "/web").contains("below"));
    let front = groups.find(&path("/web/front")).expect("group");
    let process = groups.segment.claim(10, 0).expect("slot");
    groups
        .segment
        .slot(process)
        .control
        .group_wanted
        .store(front.0, std::sync::atomic::Ordering::Relaxed);
    assert!(refused(&mut groups, "/web/front").contains("processes"));
    groups.segment.regroup(process);
    groups.set(front, [("swap.max", "0")]).expect("set");
    assert_eq!(groups.segment.lease_charged(process), None);
    groups.segment.release(process, |_| {});
    assert_eq!(value(&groups, "/web", "swap.events"), "high 0 max 1 fail 1");
    groups.remove(&path("/web/front")).expect("empty");
    assert_eq!(value(&groups, "/web", "swap.events"), "high 0 max 1 fail 1");
    assert_eq!(value(&groups, "/", "swap.events"), "high 0 max 1 fail 1");
}

#[test]
fn several_settings_are_made_whole_or_not_at_all() {
    let mut groups = groups(&["/web"]);
    let web = groups.find(&path("/web")).expect("group");
    let error = groups.set(web, [("ram.max", "1G"), ("ram.high", "much")]).expect_err("refused");
    assert!(error.to_string().starts_with("/web: ram.high: "), "{error}");
    assert_eq!(value(&groups, "/web", "ram.max"), "max");
    groups.set(web, [("ram.max", "50%"), ("ram.high", "400M"), ("swap.max", "5M")]).expect("set");
    assert_eq!(value(&groups, "/web", "ram.max"), "536870912");
    assert_eq!(groups.segment.group(web).swap_max(), Some(2), "whole extents");
    assert_eq!(groups.least(web, |s| s.ram_high), Some(400 << 20));
}

#[test]
fn effective_tiers_follow_the_parents_at_every_write() {
    let mut groups = groups(&["/a/b"]);
    groups.set_tiers("+SSD:100 +HDD:50 +NET:-1").expect("tiers");
    let (a, b) = (groups.find(&path("/a")).expect("a"), groups.find(&path("/a/b")).expect("b"));
    groups.set(b, [("swap.tiers", "-SSD")]).expect("child");
    groups.set(a, [("swap.tiers", "-HDD")]).expect("parent");
    assert_eq!(value(&groups, "/a", "swap.tiers.effective"), "SSD NET");
    assert_eq!(value(&groups, "/a/b", "swap.tiers"), "HDD NET");
    assert_eq!(value(&groups, "/a/b", "swap.tiers.effective"), "NET");
    groups.set(b, [("swap.tiers", "+SSD")]).expect("child");
    assert_eq!(value(&groups, "/a/b", "swap.tiers.effective"), "SSD NET", "HDD is excluded above");
    groups.set_tiers("-HDD").expect("tiers");
    groups.set_tiers("+TAPE:10").expect("tiers");
    assert_eq!(
        value(&groups, "/a/b", "swap.tiers.effective"),
        "SSD TAPE NET",
        "the exclusion went with the tier"
    );
    let late = groups.ensure(&path("/a/b/c"), 0).expect("group");
    groups.set(a, [("swap.tiers", "-NET")]).expect("parent");
    assert_eq!(groups.view(late).values["swap.tiers.effective"], "SSD TAPE");
}

#[test]
fn a_group_leases_nothing_of_areas_of_excluded_tiers() {
    use swaptide_ipc::NewArea;
    let mut groups = groups(&["/a"]);
    let segment = groups.segment;
    let add = |priority| segment.add_area(NewArea::of_file(priority, 9));
    let (slow, fast) = (add(5).expect("area"), add(200).expect("area"));
    groups.set_tiers("+SSD:100 +HDD:-1").expect("tiers");
    let a = groups.find(&path("/a")).expect("a");
    groups.set(a, [("swap.tiers", "-SSD")]).expect("set");
    let process = segment.claim(10, 0).expect("slot");
    segment.slot(process).control.group_wanted.store(a.0, std::sync::atomic::Ordering::Relaxed);
    segment.regroup(process);
    let area =
        || segment.place_of(segment.lease_charged(process).expect("extent")).expect("place").area;
    assert_eq!(area(), slow);
    let late = add(300).expect("area");
    assert_eq!(area(), slow, "an area that was added a moment ago");
    groups.publish();
    assert_eq!(area(), slow);
    groups.set(a, [("swap.tiers", "+SSD")]).expect("set");
    assert_eq!((area(), segment.group(a).areas_excluded()), (late, 0));
    assert!(segment.area(fast).used() == 0);
    let error = groups.set_tiers("-SSD").expect_err("a device is in it").to_string();
    assert!(error.contains("\"-SSD\"") && error.contains("in use"), "{error}");
}

#[test]
fn usage_and_events_summed_up_the_tree() {
    let mut groups = groups(&["/a/b"]);
    let (a, b) = (groups.find(&path("/a")).expect("a"), groups.find(&path("/a/b")).expect("b"));
    groups.set(b, [("ram.high", "100M"), ("ram.max", "200M"), ("ram.low", "50M")]).expect("set");
    let stalled = TimeShare::of(500, Duration::from_millis(1));
    let usage = |mib: u64| GroupUsage {
        ram: mib << 20,
        zswap: 1,
        swapped: 5,
        refaults: 0,
        processes: 1,
        stalled,
    };
    let mut look = |in_a: u64, in_b: u64, starved: bool| {
        groups.account(
            &BTreeMap::from([(a, usage(in_a)), (b, usage(in_b))]),
            Duration::from_secs(2),
            |_| starved,
        );
        (groups.usage(GroupIndex::ROOT).ram >> 20, groups.events(GroupIndex::ROOT))
    };
    assert_eq!(look(10, 90, false), (100, Events::default()));
    assert_eq!(look(500, 101, false).1, Events { ram_high: 1, ..Events::default() });
    assert_eq!(look(500, 110, true).1, Events { ram_high: 1, ram_low: 1, ..Events::default() });
    assert_eq!(look(500, 90, true).1.ram_high, 1);
    assert_eq!(
        look(500, 199, false),
        (699, Events { ram_high: 2, ram_max: 1, ram_low: 1, ..Events::default() })
    );
    assert_eq!(value(&groups, "/a", "ram.events"), "low 1 high 2 max 1");
    // Five looks of two seconds: half of the time in one, three quarters in both.
    assert_eq!(
        value(&groups, "/a/b", "ram.pressure"),
        "some avg10=31.61 avg60=7.68 avg300=1.64 total=5000000"
    );
    assert_eq!(value(&groups, "/a", "ram.pressure"), value(&groups, "/", "ram.pressure"));
    assert!(value(&groups, "/", "ram.pressure").ends_with("total=7500000"));
    assert_eq!(
        (value(&groups, "/a", "processes"), value(&groups, "/", "zswap.current")),
        ("2".into(), "2".into())
    );
}

#[test]
fn growth_costs_what_swap_high_was_passed_by_here_or_above() {
    let mut groups = groups(&["/a/b"]);
    let (a, b) = (groups.find(&path("/a")).expect("a"), groups.find(&path("/a/b")).expect("b"));
    let segment = groups.segment;
    segment.add_area(swaptide_ipc::NewArea::of_file(0, 100)).expect("area");
    let process = segment.claim(10, 0).expect("slot");
    segment.slot(process).control.group_wanted.store(b.0, std::sync::atomic::Ordering::Relaxed);
    segment.regroup(process);
    for _ in 0..11 {
        segment.lease_charged(process).expect("extent");
    }
    let price = |groups: &GroupTree| groups.price_of_growth(b);
    assert_eq!(price(&groups), 0, "no bound");
    groups.set(a, [("swap.high", "22M")]).expect("set");
    assert_eq!(price(&groups), 0, "at the bound");
    groups.set(a, [("swap.high", "20M")]).expect("set");
    assert_eq!(price(&groups), 640_000, "a tenth past it");
    groups.set(b, [("swap.high", "11M")]).expect("set");
    assert_eq!((price(&groups), groups.price_of_growth(a)), (64_000_000, 640_000));
    groups.set(b, [("swap.high", "0")]).expect("set");
    assert!(price(&groups) >= 64_000_000);
}

#[test]
fn every_key_that_is_documented_can_be_read() {
    let groups = groups(&[]);
    let view = groups.view(GroupIndex::ROOT);
    for key in KEYS.iter().chain(&READ_ONLY) {
        assert!(view.values.contains_key(*key), "{key}");
    }
    assert_eq!(view.values.len(), KEYS.len() + READ_ONLY.len());
}
