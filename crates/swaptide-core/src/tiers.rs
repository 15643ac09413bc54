//! Tiers: named ranges of the priorities of swap devices, and the masks by which groups are kept off some of them. (kernel-facts F;
//! seed swap-tiers)
//!
//! A tier is a name and the priority it starts at; it ends below the start of the next higher tier, the highest at [`Priority::MAX`]. What
//! tier a device is in follows from its priority alone.
//!
//! Text that changes tiers is a list of tokens, with blanks or commas between them, carried out from left to right:
//!
//! | token        | does | the range |
//! |--------------|------|-----------|
//! | `+NAME:PRIO` | adds a tier | splits the tier that held PRIO: the new one takes PRIO and above |
//! | `-NAME`      | removes one | goes to the next lower tier; the lowest tier's to the next higher one |
//! | `NAME:PRIO`  | moves the start of one | goes to, or comes from, its neighbours |
//!
//! Text that changes a mask is a list of `-NAME` (excludes) and `+NAME` (takes the exclusion back), with blanks between; no token at
//! all takes back every exclusion.
//!
//! Invariants
//! 1. A text is carried out whole or not at all.
//! 2. Either there is no tier, or the lowest starts at -1: every priority is in exactly one. Within a text this may be otherwise; it is
//!    looked at once, after the last token.
//! 3. No token moves a device in use from its tier to another, or takes its tier away. Devices that were in no tier (there was none) are
//!    bound by nothing.
//! 4. A tier keeps its index as long as it lives, and with it its bit in all masks. When it goes, its owner sets the bit in every mask
//!    ([`Applied::freed`]), so that a later tier of the same index begins permitted.
//! 5. A child's effective mask is its own one within its parent's effective mask.
//!
//! Locks: none. Nothing here is needed to allocate: who writes computes, who allocates compares one word.

use core::fmt;

/// Most tiers at one time.
pub const MAX_TIERS: usize = 8;
/// Longest name of a tier in bytes.
pub const MAX_TIER_NAME: usize = 15;
/// The bit that stands for devices in no tier.
const NO_TIER: u32 = 31;

/// The priority of a swap device, from -1 to 32767; the higher one is used first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Priority(i16);

impl Priority {
    /// The lowest.
    pub const MIN: Priority = Priority(-1);
    /// The highest.
    pub const MAX: Priority = Priority(i16::MAX);

    /// The priority of a number; `None` for one that is out of range.
    pub fn new(number: i32) -> Option<Priority> {
        let number = i16::try_from(number).ok()?;
        (number >= Self::MIN.0).then_some(Priority(number))
    }

    /// Its number.
    pub fn get(self) -> i32 {
        self.0.into()
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The place of a tier among the [`MAX_TIERS`], and its bit in masks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TierIndex(u8);

impl TierIndex {
    /// Its number.
    pub fn get(self) -> u32 {
        self.0.into()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Name {
    bytes: [u8; MAX_TIER_NAME],
    len: u8,
}

impl Name {
    fn new(text: &str) -> Result<Name, Rule> {
        if text.len() > MAX_TIER_NAME {
            return Err(Rule::LongName);
        }
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            return Err(Rule::BadName);
        }
        let mut bytes = [0; MAX_TIER_NAME];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Ok(Name { bytes, len: text.len() as u8 })
    }

    fn as_str(&self) -> &str {
        // Only ASCII was let in.
        core::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Tier {
    name: Name,
    start: Priority,
}

/// A tier as it is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierView<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its index.
    pub index: TierIndex,
    /// Its lowest priority.
    pub start: Priority,
    /// Its highest priority.
    pub end: Priority,
}

/// The rule that a token broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rule {
    /// It is none of the three kinds (for a mask: has no sign).
    Grammar,
    /// The name is empty or has other characters than letters, digits and underscores.
    BadName,
    /// The name is longer than [`MAX_TIER_NAME`].
    LongName,
    /// What stands behind the colon is no number, or none from -1 to 32767.
    BadPriority,
    /// A tier of this name exists.
    NameTaken,
    /// Another tier starts there.
    StartTaken,
    /// There are [`MAX_TIERS`] already.
    Full,
    /// No tier has this name.
    Unknown,
    /// A device in use would be in another tier or in none.
    InUse(Priority),
    /// After the last token, the lowest tier starts above -1.
    Uncovered(Priority),
}

/// A text that cannot be carried out. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierError {
    /// The token at fault; for [`Rule::Uncovered`] the name of the lowest tier.
    pub token: String,
    /// Its number in the text, from 1.
    pub number: usize,
    /// What is wrong with it.
    pub rule: Rule,
}

impl fmt::Display for TierError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TierError { token, number, rule } = self;
        if let Rule::Uncovered(start) = rule {
            return write!(
                f,
                "the lowest tier, {token}, starts at {start}: priorities from -1 to {} are in no tier; let one start at -1",
                start.get() - 1
            );
        }
        write!(f, "token {number}, {token:?}: ")?;
        match rule {
            Rule::Grammar => {
                f.write_str("not a change; write +NAME:PRIO, -NAME or NAME:PRIO for tiers, +NAME or -NAME for a group")
            }
            Rule::BadName => f.write_str("a tier's name has letters, digits and underscores only"),
            Rule::LongName => write!(f, "a tier's name has at most {MAX_TIER_NAME} bytes"),
            Rule::BadPriority => write!(f, "after the colon comes a priority from {} to {}", Priority::MIN, Priority::MAX),
            Rule::NameTaken => f.write_str("a tier of this name exists; write it without the + to move its start"),
            Rule::StartTaken => f.write_str("another tier starts at this priority"),
            Rule::Full => write!(f, "there are {MAX_TIERS} tiers already; remove one first"),
            Rule::Unknown => f.write_str("there is no tier of this name"),
            Rule::InUse(at) => write!(f, "a device of priority {at} is in use and would change its tier; take it away first"),
            Rule::Uncovered(_) => Ok(()),
        }
    }
}

impl core::error::Error for TierError {}

/// What a text did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Bits of tiers that were removed: to be set in every mask ([`TierMask::forget`]).
    pub freed: u32,
}

/// All tiers of a host or a run.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Tiers {
    places: [Option<Tier>; MAX_TIERS],
}

impl fmt::Debug for Tiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tiers({})", self.spec())
    }
}

impl Tiers {
    /// No tier.
    pub fn new() -> Tiers {
        Tiers::default()
    }

    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.places.iter().all(Option::is_none)
    }

    /// The tiers, highest first.
    pub fn iter(&self) -> impl Iterator<Item = TierView<'_>> {
        let mut order: [Option<(TierIndex, &Tier)>; MAX_TIERS] = [None; MAX_TIERS];
        for (at, place) in self.places.iter().enumerate() {
            order[at] = place.as_ref().map(|tier| (TierIndex(at as u8), tier));
        }
        order.sort_unstable_by_key(|place| core::cmp::Reverse(place.map(|(_, tier)| tier.start)));
        let mut end = Priority::MAX;
        order.into_iter().flatten().map(move |(index, tier)| {
            let view = TierView { name: tier.name.as_str(), index, start: tier.start, end };
            // Of the lowest tier this would be -2, which nobody looks at.
            end = Priority(tier.start.0 - 1);
            view
        })
    }

    /// The tier of a priority; `None` when there are no tiers.
    pub fn tier_of(&self, priority: Priority) -> Option<TierIndex> {
        self.iter().find(|tier| tier.start <= priority).map(|tier| tier.index)
    }

    /// The tier of a name.
    pub fn find(&self, name: &str) -> Option<TierIndex> {
        self.iter().find(|tier| tier.name == name).map(|tier| tier.index)
    }

    /// Carries out a text; `devices` are the priorities of those in use.
    ///
    /// # Errors
    /// The first token that breaks a rule, and which; nothing is changed then.
    pub fn apply(&mut self, text: &str, devices: &[Priority]) -> Result<Applied, TierError> {
        let before = *self;
        let mut next = before;
        let mut applied = Applied::default();
        let tokens = text.split(|c: char| c == ',' || c.is_ascii_whitespace()).filter(|token| !token.is_empty());
        let mut last = 0;
        for (at, token) in tokens.enumerate() {
            last = at + 1;
            let failed = |rule| TierError { token: token.to_owned(), number: at + 1, rule };
            next.change(token, &mut applied).map_err(failed)?;
            let moved = devices.iter().find(|device| match before.tier_of(**device) {
                Some(tier) => !next.still_in(**device, tier, applied),
                None => false,
            });
            if let Some(device) = moved {
                return Err(failed(Rule::InUse(*device)));
            }
        }
        if let Some(lowest) = next.iter().last().filter(|lowest| lowest.start > Priority::MIN) {
            return Err(TierError { token: lowest.name.to_owned(), number: last, rule: Rule::Uncovered(lowest.start) });
        }
        *self = next;
        Ok(applied)
    }

    /// Has those tiers that a text makes where there are none, instead of these; one that both have keeps its index. `devices` are the priorities of
    /// those in use.
    ///
    /// # Errors
    /// As [`Tiers::apply`]; for a device that would be in a tier of another name, the token is the name of its present one.
    pub fn replace(&mut self, text: &str, devices: &[Priority]) -> Result<Applied, TierError> {
        let mut fresh = Tiers::new();
        fresh.apply(text, &[])?;
        let mut next = Tiers::new();
        for tier in fresh.places.iter().flatten() {
            if let Some(index) = self.find(tier.name.as_str()) {
                next.places[usize::from(index.0)] = Some(*tier);
            }
        }
        for tier in fresh.places.iter().flatten().filter(|tier| self.find(tier.name.as_str()).is_none()) {
            if let Some(free) = next.places.iter_mut().find(|place| place.is_none()) {
                *free = Some(*tier);
            }
        }
        for device in devices {
            let (old, new) = (self.name_of(*device), next.name_of(*device));
            if let Some(old) = old.filter(|old| new != Some(*old)) {
                return Err(TierError { token: old.to_owned(), number: 1, rule: Rule::InUse(*device) });
            }
        }
        let gone = self.iter().filter(|tier| next.find(tier.name).is_none());
        let applied = Applied { freed: gone.fold(0, |freed, tier| freed | 1 << tier.index.get()) };
        *self = next;
        Ok(applied)
    }

    fn name_of(&self, priority: Priority) -> Option<&str> {
        self.iter().find(|tier| tier.start <= priority).map(|tier| tier.name)
    }

    /// A tier that was removed and added again is another one, even where it has the same index.
    fn still_in(&self, device: Priority, tier: TierIndex, applied: Applied) -> bool {
        applied.freed & (1 << tier.get()) == 0 && self.tier_of(device) == Some(tier)
    }

    fn change(&mut self, token: &str, applied: &mut Applied) -> Result<(), Rule> {
        if let Some(rest) = token.strip_prefix('+') {
            let (name, start) = named_start(rest)?;
            self.add(name, start)
        } else if let Some(name) = token.strip_prefix('-') {
            let index = self.known(Name::new(name)?)?;
            self.remove(index);
            applied.freed |= 1 << index.get();
            Ok(())
        } else {
            let (name, start) = named_start(token)?;
            let index = self.known(name)?;
            self.set_start(index, start)
        }
    }

    fn known(&self, name: Name) -> Result<TierIndex, Rule> {
        self.find(name.as_str()).ok_or(Rule::Unknown)
    }

    fn add(&mut self, name: Name, start: Priority) -> Result<(), Rule> {
        if self.find(name.as_str()).is_some() {
            return Err(Rule::NameTaken);
        }
        if self.iter().any(|tier| tier.start == start) {
            return Err(Rule::StartTaken);
        }
        let free = self.places.iter_mut().find(|place| place.is_none()).ok_or(Rule::Full)?;
        *free = Some(Tier { name, start });
        Ok(())
    }

    fn remove(&mut self, index: TierIndex) {
        let gone = self.places[usize::from(index.0)].take();
        // The next lower tier reaches up by itself; below the lowest there is none, so the next higher one reaches down.
        if gone.is_some_and(|tier| tier.start == Priority::MIN)
            && let Some(heir) = self.iter().last().map(|tier| tier.index)
        {
            self.place_start(heir, Priority::MIN);
        }
    }

    fn set_start(&mut self, index: TierIndex, start: Priority) -> Result<(), Rule> {
        if self.iter().any(|tier| tier.start == start && tier.index != index) {
            return Err(Rule::StartTaken);
        }
        self.place_start(index, start);
        Ok(())
    }

    fn place_start(&mut self, index: TierIndex, start: Priority) {
        if let Some(tier) = &mut self.places[usize::from(index.0)] {
            tier.start = start;
        }
    }

    /// A text that makes these tiers where there are none; with the same indices if no index between theirs is free.
    pub fn spec(&self) -> String {
        let tokens: Vec<String> =
            self.places.iter().flatten().map(|tier| format!("+{}:{}", tier.name.as_str(), tier.start)).collect();
        tokens.join(" ")
    }
}

/// The list, highest tier first, in the columns of the kernel's own.
impl fmt::Display for Tiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<16}{:<5}{:<11}PrioEnd", "Name", "Idx", "PrioStart")?;
        for tier in self.iter() {
            writeln!(f, "{:<16}{:<5}{:<11}{}", tier.name, tier.index.get(), tier.start.get(), tier.end)?;
        }
        Ok(())
    }
}

fn named_start(text: &str) -> Result<(Name, Priority), Rule> {
    let (name, number) = text.split_once(':').ok_or(Rule::Grammar)?;
    let name = Name::new(name)?;
    let digits = number.strip_prefix('-').unwrap_or(number);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Rule::BadPriority);
    }
    let start = number.parse().ok().and_then(Priority::new).ok_or(Rule::BadPriority)?;
    Ok((name, start))
}

/// Which tiers are permitted; a bit for each index, and one for devices in no tier, which nothing excludes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TierMask(u32);

impl Default for TierMask {
    fn default() -> TierMask {
        TierMask::ALL
    }
}

impl TierMask {
    /// Everything is permitted.
    pub const ALL: TierMask = TierMask(u32::MAX);

    /// Whether devices of a tier may be used (`None`: devices in no tier).
    pub fn permits(self, tier: Option<TierIndex>) -> bool {
        self.0 & (1 << tier.map_or(NO_TIER, TierIndex::get)) != 0
    }

    /// Whether devices of this priority may be used.
    pub fn permits_priority(self, tiers: &Tiers, priority: Priority) -> bool {
        self.permits(tiers.tier_of(priority))
    }

    /// What this mask permits below a parent with that effective mask.
    #[must_use]
    pub fn within(self, parent: TierMask) -> TierMask {
        TierMask(self.0 & parent.0)
    }

    /// Forgets the exclusions of tiers that are gone ([`Applied::freed`]).
    pub fn forget(&mut self, freed: u32) {
        self.0 |= freed;
    }

    /// Carries out a text of `-NAME` and `+NAME`; one without tokens permits everything.
    ///
    /// # Errors
    /// The first token that breaks a rule, and which; nothing is changed then.
    pub fn apply(&mut self, text: &str, tiers: &Tiers) -> Result<(), TierError> {
        let mut next = *self;
        let mut any = false;
        for (at, token) in text.split_ascii_whitespace().enumerate() {
            any = true;
            let failed = |rule| TierError { token: token.to_owned(), number: at + 1, rule };
            let (excludes, name) = match (token.strip_prefix('-'), token.strip_prefix('+')) {
                (Some(name), _) => (true, name),
                (_, Some(name)) => (false, name),
                _ => return Err(failed(Rule::Grammar)),
            };
            let name = Name::new(name).map_err(failed)?;
            let bit = 1 << tiers.known(name).map_err(failed)?.get();
            next.0 = if excludes { next.0 & !bit } else { next.0 | bit };
        }
        *self = if any { next } else { TierMask::ALL };
        Ok(())
    }

    /// Names of the permitted tiers, highest first, with blanks between.
    pub fn names(self, tiers: &Tiers) -> String {
        let names: Vec<&str> = tiers.iter().filter(|tier| self.permits(Some(tier.index))).map(|tier| tier.name).collect();
        names.join(" ")
    }
}

#[cfg(test)]
mod tests {
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
    fn a_removed_tier_goes_to_the_lower_one_and_the_lowest_to_the_higher_one() {
        let all = tiers("+SSD:100 +HDD:50 +NET:-1");
        let mut upper = all;
        upper.apply("-SSD", &[]).expect("remove");
        assert_eq!(ranges(&upper), [("HDD", 1, 50, 32767), ("NET", 2, -1, 49)]);
        let mut lower = all;
        lower.apply("-NET\n", &[]).expect("remove");
        assert_eq!(ranges(&lower), [("SSD", 0, 100, 32767), ("HDD", 1, -1, 99)]);
    }

    #[test]
    fn every_rule_names_the_token_that_broke_it_and_nothing_changes() {
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
        assert_eq!(Tiers::new().apply("+SSD:0", &[]).expect_err("uncovered").rule, Rule::Uncovered(at(0)));
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
        for text in ["-NET", "+X:61", "+X:20", "HDD:60", "HDD:51 SSD:61", "SSD:200", "+X:201", "NET:-1"] {
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
    fn other_tiers_instead_of_these_keep_the_indices_of_equal_names() {
        let mut all = tiers("+SSD:100 +HDD:50 +NET:-1");
        assert_eq!(all.replace("+TAPE:-1 +HDD:40 +SSD:90", &[at(60)]).expect("tiers"), Applied { freed: 4 });
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
    fn masks_exclude_and_take_back_and_a_child_never_has_more_than_its_parent() {
        let all = tiers("+SSD:100 +HDD:50 +NET:-1");
        let mask = |text: &str| {
            let mut mask = TierMask::ALL;
            mask.apply(text, &all).expect("mask");
            mask
        };
        let parent = mask("-HDD").within(TierMask::ALL);
        let child = mask(" -SSD\t");
        assert_eq!((child.names(&all), child.within(parent).names(&all)), ("HDD NET".into(), "NET".into()));
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
                    let heir = match start {
                        0 => self.map.iter().copied().find(|at| *at != Some(tier)).flatten(),
                        start => self.map[start - 1],
                    };
                    self.replace(Some(tier), heir);
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
                    let heir = if from == 0 { None } else { self.map[from - 1] };
                    self.replace(Some(tier), heir);
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
                        if was.is_some_and(|was| freed & (1 << was) != 0 || self.of(*device) != Some(was)) {
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
        let name = || proptest::sample::select(vec!["A", "B", "C", "D", "E", "F", "G", "H", "I", "J"]).prop_map(str::to_owned);
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
            writes in proptest::collection::vec(proptest::collection::vec((op(), separator()), 1..6), 1..10),
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
                    (found, expected) => prop_assert!(false, "{text}: {found:?}, the map says {expected:?}"),
                }
                let mut painted = vec![None; 32769];
                for tier in tiers.iter() {
                    for priority in tier.start.get()..=tier.end.get() {
                        prop_assert!(painted[(priority + 1) as usize].replace(tier.index.get() as usize).is_none());
                    }
                    prop_assert_eq!(naive.names[tier.index.get() as usize].as_deref(), Some(tier.name));
                }
                prop_assert!(painted == naive.map, "{}", text);
                for priority in (-1..20).chain([32766, 32767]) {
                    prop_assert_eq!(tiers.tier_of(at(priority)).map(|tier| tier.get() as usize), naive.of(priority));
                }
                let mut again = Tiers::new();
                again.apply(&tiers.spec(), &in_use).expect("what is written out can be read");
                let named = |tiers: &Tiers| tiers.iter().map(|t| (t.name.to_owned(), t.start, t.end)).collect::<Vec<_>>();
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
            prop_assert!(tiers.is_empty() || tiers.iter().last().is_some_and(|lowest| lowest.start == Priority::MIN));
            let mut mask = TierMask::ALL;
            if mask.apply(&text, &before).is_err() {
                prop_assert_eq!(mask, TierMask::ALL);
            }
        }
    }
}
