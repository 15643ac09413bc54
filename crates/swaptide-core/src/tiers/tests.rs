use super::*;
use proptest::prelude::*;

fn tiers(text: &str) -> Tiers {
    let mut tiers = Tiers::new();
    tiers.apply(text, &[]).expect("tiers");
    tiers
}

fn ranges(tiers: &Tiers) -> Vec<(&str, u32, i32, i32)> {
    tiers.iter().map(|t| (t.name, t.index.get(), t.start.get(), t.end.get())).collect()
}

fn at(priority: i32) -> Priority {
    Priority::new(priority).expect("priority")
}

#[test]
fn the_examples_of_the_seed() {
    let mut tiers = tiers("+HDD:50, +NET:-1");
    assert_eq!(ranges(&tiers), [("HDD", 0, 50, 32767), ("NET", 1, -1, 49)]);
    tiers.apply("HDD:80, +SSD:100", &[]).expect("split");
    assert_eq!(ranges(&tiers), [("SSD", 2, 100, 32767), ("HDD", 0, 80, 99), ("NET", 1, -1, 79)]);
    assert_eq!(
        tiers.to_string(),
        "Name            Idx  PrioStart  PrioEnd\n\
             SSD             2    100        32767\n\
             HDD             0    80         99\n\
             NET             1    -1         79\n"
    );
    assert_eq!(tiers.apply("-SSD,-HDD,-NET", &[]).expect("all"), Applied { freed: 7 });
    assert!(tiers.is_empty());
    assert_eq!(tiers.to_string().lines().count(), 1);
}

#[test]
fn removed_tier_merges_into_neighbour() {
    let all = tiers("+SSD:100 +HDD:50 +NET:-1");
    let mut upper = all;
    upper.apply("-SSD", &[]).expect("remove");
    assert_eq!(ranges(&upper), [("HDD", 1, 50, 32767), ("NET", 2, -1, 49)]);
    let mut lower = all;
    lower.apply("-NET\n", &[]).expect("remove");
    assert_eq!(ranges(&lower), [("SSD", 0, 100, 32767), ("HDD", 1, -1, 99)]);
}

#[test]
fn broken_rule_names_token_changes_nothing() {
    let before = tiers("+SSD:100 +HDD:50 +NET:-1");
    let long = "+ABCDEFGHIJKLMNOP:7";
    for (text, number, token, rule) in [
        ("SSD", 1, "SSD", Rule::Grammar),
        ("+FAST", 1, "+FAST", Rule::Grammar),
        ("+:7", 1, "+:7", Rule::BadName),
        ("-", 1, "-", Rule::BadName),
        ("-A-B", 1, "-A-B", Rule::BadName),
        ("+A:B:7", 1, "+A:B:7", Rule::BadPriority),
        (long, 1, long, Rule::LongName),
        ("HDD:60, +X:", 2, "+X:", Rule::BadPriority),
        ("+X:-2", 1, "+X:-2", Rule::BadPriority),
        ("+X:32768", 1, "+X:32768", Rule::BadPriority),
        ("+X:99999999999", 1, "+X:99999999999", Rule::BadPriority),
        ("+X:+5", 1, "+X:+5", Rule::BadPriority),
        ("+X:0x5", 1, "+X:0x5", Rule::BadPriority),
        ("-SSD +HDD:7", 2, "+HDD:7", Rule::NameTaken),
        ("+X:50", 1, "+X:50", Rule::StartTaken),
        ("SSD:-1", 1, "SSD:-1", Rule::StartTaken),
        ("-ssd", 1, "-ssd", Rule::Unknown),
        ("-SSD -SSD", 2, "-SSD", Rule::Unknown),
        ("TAPE:5", 1, "TAPE:5", Rule::Unknown),
        ("+A:1 +B:2 +C:3 +D:4 +E:5 +F:6", 6, "+F:6", Rule::Full),
        ("NET:10 HDD:60", 2, "NET", Rule::Uncovered(at(10))),
    ] {
        let mut tiers = before;
        let error = tiers.apply(text, &[]).expect_err(text);
        assert_eq!(error, TierError { token: token.into(), number, rule }, "{text}");
        assert!(error.to_string().contains(token) && !error.to_string().contains('\n'), "{error}");
        assert_eq!(tiers, before, "{text}");
    }
    assert_eq!(
        Tiers::new().apply("+SSD:0", &[]).expect_err("uncovered").rule,
        Rule::Uncovered(at(0))
    );
    let mut tiers = before;
    tiers.apply("NET:10 +LOW:-1 SSD:100,,\t", &[]).expect("covered in the end");
    assert_eq!(tiers.iter().last().map(|tier| tier.name), Some("LOW"));
    tiers.apply(" , ", &[]).expect("no token");
}

#[test]
fn a_device_in_use_keeps_its_tier() {
    let before = tiers("+SSD:100 +HDD:50 +NET:-1");
    let devices = [at(60), at(200)];
    for (text, number, device) in [
        ("-HDD", 1, 60),
        ("+X:55", 1, 60),
        ("+X:60", 1, 60),
        ("NET:10 +Y:-1 HDD:61", 3, 60),
        ("SSD:60", 1, 60),
        ("NET:55", 1, 60),
        ("SSD:201", 1, 200),
        ("+X:150", 1, 200),
        ("-SSD +SSD:100", 1, 200),
    ] {
        let mut tiers = before;
        let error = tiers.apply(text, &devices).expect_err(text);
        assert_eq!((error.number, error.rule), (number, Rule::InUse(at(device))), "{text}");
        assert_eq!(tiers, before);
    }
    for text in ["-NET", "+X:61", "+X:20", "HDD:60", "HDD:51 SSD:61", "SSD:200", "+X:201", "NET:-1"]
    {
        let mut tiers = before;
        tiers.apply(text, &devices).expect(text);
        assert_eq!(tiers.tier_of(at(60)), before.tier_of(at(60)), "{text}");
        assert_eq!(tiers.tier_of(at(200)), before.tier_of(at(200)), "{text}");
    }
    let mut first = Tiers::new();
    first.apply("+SSD:100 +FAST:150 +REST:-1", &devices).expect("devices without a tier get one");
    assert_eq!(first.tier_of(at(200)), first.find("FAST"));
}

#[test]
fn replaced_tiers_keep_indices_by_name() {
    let mut all = tiers("+SSD:100 +HDD:50 +NET:-1");
    assert_eq!(
        all.replace("+TAPE:-1 +HDD:40 +SSD:90", &[at(60)]).expect("tiers"),
        Applied { freed: 4 }
    );
    assert_eq!(ranges(&all), [("SSD", 0, 90, 32767), ("HDD", 1, 40, 89), ("TAPE", 2, -1, 39)]);
    let before = all;
    assert_eq!(all.replace("+HDD:70 +TAPE:-1", &[at(60)]).expect_err("it is in HDD").token, "HDD");
    assert_eq!(all.replace("", &[at(60)]).expect_err("it is in HDD").rule, Rule::InUse(at(60)));
    all.replace("+HDD:70", &[]).expect_err("uncovered");
    assert_eq!(all, before);
    all.replace("", &[]).expect("none");
    assert!(all.is_empty());
}

#[test]
fn masks_are_reversible_and_a_child_never_exceeds_its_parent() {
    let all = tiers("+SSD:100 +HDD:50 +NET:-1");
    let mask = |text: &str| {
        let mut mask = TierMask::ALL;
        mask.apply(text, &all).expect("mask");
        mask
    };
    let parent = mask("-HDD").within(TierMask::ALL);
    let child = mask(" -SSD\t");
    assert_eq!(
        (child.names(&all), child.within(parent).names(&all)),
        ("HDD NET".into(), "NET".into())
    );
    let mut greedy = child;
    greedy.apply("+SSD +HDD", &all).expect("mask");
    assert_eq!(greedy, TierMask::ALL);
    assert_eq!(greedy.within(parent).names(&all), "SSD NET");
    assert!(!parent.permits_priority(&all, at(99)) && parent.permits_priority(&all, at(100)));
    assert!(parent.permits(None));
    let mut kept = child;
    for (text, number, rule) in [
        ("-NET HDD", 2, Rule::Grammar),
        ("-NET -TAPE", 2, Rule::Unknown),
        ("-NET,-HDD", 1, Rule::BadName),
        ("+", 1, Rule::BadName),
    ] {
        let error = kept.apply(text, &all).expect_err(text);
        assert_eq!((error.number, error.rule), (number, rule), "{text}");
        assert_eq!(kept, child);
    }
    kept.apply("", &all).expect("no token");
    assert_eq!(kept, TierMask::ALL);
}

#[test]
fn the_exclusion_of_a_tier_that_is_gone_is_forgotten() {
    let mut all = tiers("+SSD:100 +HDD:50 +NET:-1");
    let mut mask = TierMask::ALL;
    mask.apply("-HDD -NET", &all).expect("mask");
    let applied = all.apply("-HDD +TAPE:10", &[]).expect("tiers");
    mask.forget(applied.freed);
    assert_eq!(all.find("TAPE").map(TierIndex::get), Some(1), "the index that was free");
    assert_eq!(mask.names(&all), "SSD TAPE");
}

/// Every priority by itself: which tier it is in, by the tier's place in `names`.
#[derive(Clone)]
struct Naive {
    map: Vec<Option<usize>>,
    names: Vec<Option<String>>,
}

impl Naive {
    fn new() -> Naive {
        Naive { map: vec![None; 32769], names: vec![None; MAX_TIERS] }
    }

    fn of(&self, priority: i32) -> Option<usize> {
        self.map[(priority + 1) as usize]
    }

    fn start_of(&self, tier: usize) -> usize {
        self.map.iter().position(|at| *at == Some(tier)).expect("a tier has a priority")
    }

    fn is_start(&self, at: usize) -> bool {
        self.map[at].is_some() && (at == 0 || self.map[at - 1] != self.map[at])
    }

    fn replace(&mut self, old: Option<usize>, new: Option<usize>) {
        self.map.iter_mut().filter(|at| **at == old).for_each(|at| *at = new);
    }

    /// From here upwards as far as one tier (or none) reaches.
    fn paint(&mut self, from: usize, tier: usize) {
        let old = self.map[from];
        let mut at = from;
        while at < self.map.len() && self.map[at] == old {
            self.map[at] = Some(tier);
            at += 1;
        }
    }

    fn run(&mut self, op: &Op) -> Result<u32, Rule> {
        let named = |name: &str| self.names.iter().position(|n| n.as_deref() == Some(name));
        match op {
            Op::Add(name, start) => {
                let from = (*start + 1) as usize;
                if named(name).is_some() {
                    return Err(Rule::NameTaken);
                }
                if self.is_start(from) {
                    return Err(Rule::StartTaken);
                }
                let free = self.names.iter().position(Option::is_none).ok_or(Rule::Full)?;
                self.names[free] = Some(name.clone());
                self.paint(from, free);
                Ok(0)
            }
            Op::Remove(name) => {
                let tier = named(name).ok_or(Rule::Unknown)?;
                let start = self.start_of(tier);
                let successor = match start {
                    0 => self.map.iter().copied().find(|at| *at != Some(tier)).flatten(),
                    start => self.map[start - 1],
                };
                self.replace(Some(tier), successor);
                self.names[tier] = None;
                Ok(1 << tier)
            }
            Op::Move(name, start) => {
                let tier = named(name).ok_or(Rule::Unknown)?;
                let (from, to) = (self.start_of(tier), (*start + 1) as usize);
                if from == to {
                    return Ok(0);
                }
                if self.is_start(to) {
                    return Err(Rule::StartTaken);
                }
                let successor = if from == 0 { None } else { self.map[from - 1] };
                self.replace(Some(tier), successor);
                self.paint(to, tier);
                Ok(0)
            }
        }
    }

    fn write(&mut self, ops: &[Op], devices: &[i32]) -> Result<u32, (Option<usize>, Rule)> {
        let before = self.clone();
        let mut freed = 0;
        let mut go = || {
            for (number, op) in ops.iter().enumerate() {
                freed |= self.run(op).map_err(|rule| (Some(number + 1), rule))?;
                for device in devices {
                    let was = before.of(*device);
                    if was
                        .is_some_and(|was| freed & (1 << was) != 0 || self.of(*device) != Some(was))
                    {
                        return Err((Some(number + 1), Rule::InUse(at(*device))));
                    }
                }
            }
            match self.map.iter().position(Option::is_some) {
                Some(lowest) if lowest > 0 => Err((None, Rule::Uncovered(at(lowest as i32 - 1)))),
                _ => Ok(freed),
            }
        };
        let result = go();
        if result.is_err() {
            *self = before;
        }
        result
    }
}

#[derive(Clone, Debug)]
enum Op {
    Add(String, i32),
    Remove(String),
    Move(String, i32),
}

impl Op {
    fn text(&self) -> String {
        match self {
            Op::Add(name, start) => format!("+{name}:{start}"),
            Op::Remove(name) => format!("-{name}"),
            Op::Move(name, start) => format!("{name}:{start}"),
        }
    }
}

fn op() -> impl Strategy<Value = Op> {
    let name = || {
        proptest::sample::select(vec!["A", "B", "C", "D", "E", "F", "G", "H", "I", "J"])
            .prop_map(str::to_owned)
    };
    // Few values, so that they meet; the ends, and any.
    let start = || prop_oneof![4 => -1..12i32, 2 => Just(-1), 1 => Just(32767), 1 => -1..=32767i32];
    prop_oneof![
        4 => (name(), start()).prop_map(|(name, start)| Op::Add(name, start)),
        2 => name().prop_map(Op::Remove),
        2 => (name(), start()).prop_map(|(name, start)| Op::Move(name, start)),
    ]
}

fn separator() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(vec![" ", ",", ", ", "\n", "\t", ",,  "])
}

proptest! {
    #[test]
    fn tiers_are_what_a_map_of_every_priority_says(
        writes in proptest::collection::vec(
            proptest::collection::vec((op(), separator()), 1..6),
            1..10,
        ),
        devices in proptest::collection::vec(-1..14i32, 0..3),
    ) {
        let (mut tiers, mut naive) = (Tiers::new(), Naive::new());
        let in_use: Vec<Priority> = devices.iter().map(|device| at(*device)).collect();
        for write in &writes {
            let text: String = write.iter().map(|(op, separator)| op.text() + separator).collect();
            let ops: Vec<Op> = write.iter().map(|(op, _)| op.clone()).collect();
            let before = tiers;
            let expected = naive.write(&ops, &devices);
            match (tiers.apply(&text, &in_use), expected) {
                (Ok(applied), Ok(freed)) => prop_assert_eq!(applied.freed, freed),
                (Err(error), Err((number, rule))) => {
                    prop_assert_eq!(error.rule, rule, "{}", text);
                    if let Some(number) = number {
                        prop_assert_eq!(&error.token, &ops[number - 1].text());
                        prop_assert_eq!(error.number, number);
                    }
                    prop_assert_eq!(tiers, before);
                }
                (found, expected) => prop_assert!(
                    false,
                    "{text}: {found:?}, the map says \
                    {expected:?}"
                ),
            }
            let mut painted = vec![None; 32769];
            for tier in tiers.iter() {
                for priority in tier.start.get()..=tier.end.get() {
                    prop_assert!(
                        painted[(priority + 1) as usize]
                            .replace(tier.index.get() as usize)
                            .is_none()
                    );
                }
                prop_assert_eq!(naive.names[tier.index.get() as usize].as_deref(), Some(tier.name));
            }
            prop_assert!(painted == naive.map, "{}", text);
            for priority in (-1..20).chain([32766, 32767]) {
                prop_assert_eq!(
                    tiers.tier_of(at(priority)).map(|tier| tier.get() as usize),
                    naive.of(priority)
                );
            }
            let mut again = Tiers::new();
            again.apply(&tiers.spec(), &in_use).expect("what is written out can be read");
            let named = |tiers: &Tiers| {
                tiers.iter().map(|t| (t.name.to_owned(), t.start, t.end)).collect::<Vec<_>>()
            };
            prop_assert_eq!(named(&again), named(&tiers));
        }
    }

    #[test]
    fn no_text_whatever_upsets_the_reader(text in "[-+,: \nA-C0-9_\\x00é]{0,40}") {
        let mut tiers = tiers("+A:10 +B:-1");
        let before = tiers;
        if tiers.apply(&text, &[at(3)]).is_err() {
            prop_assert_eq!(tiers, before);
        }
        prop_assert!(
            tiers.is_empty()
                || tiers.iter().last().is_some_and(|lowest| lowest.start == Priority::MIN)
        );
        let mut mask = TierMask::ALL;
        if mask.apply(&text, &before).is_err() {
            prop_assert_eq!(mask, TierMask::ALL);
        }
    }
}
