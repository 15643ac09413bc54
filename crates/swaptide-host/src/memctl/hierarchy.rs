//! How a budget is divided over a hierarchy of groups and the processes in them. Pure arithmetic.
//!
//! A member states the least that it needs (its *floor*), what it would use beyond that (its
//! *demand*), and what of that it has shown to work on (its *working set*). A group has a *cap*,
//! which nothing goes past, and a *low* protection: of what its processes use, so much is given
//! before any process gets by demand.
//!
//! From the root down, what a group has is divided among the processes in it and the groups below
//! it:
//! 1. each one's floor; where even these do not fit, parts of them;
//! 2. protections, as far as they fit: parts of them, if not;
//! 3. working sets; where they do not all fit, three quarters of what is left goes to them, and of
//!    that no process gets more than another one, in whatever group, that lacks some of its own. So
//!    a process that fits is not slowed down by one that no share would do for;
//! 4. the rest in proportion to the demand beyond that. A member that reaches its cap leaves what
//!    it would have got to the others.
//!
//! Invariants
//! 1. No process has more than the cap of any group above it, together with all others there.
//! 2. All together have no more than the budget.
//! 3. A group's protection is honoured where the protections and floors of its neighbours leave
//!    room for it.
//!
//! Locks: none.

/// Where working sets do not all fit, this part of what is left for them goes by demand all the
/// same: one that writes without end, or was never swapped, has none.
const PART_BY_DEMAND_DIVISOR: u64 = 4;
/// How exactly equal parts are found.
const LEVEL_BYTES: u64 = 64 << 10;

/// A group. The first of a list is the root; a parent stands before its children.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    /// The number of its parent; of the root, its own.
    pub parent: usize,
    /// The most that it may have.
    pub cap: u64,
    /// What it keeps of its use.
    pub low: u64,
}

/// What a process needs of the budget, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    /// The number of its group.
    pub node: usize,
    /// What it cannot do without.
    pub floor: u64,
    /// Bytes that it uses now.
    pub used: u64,
    /// What it would use beyond its floor: not less than what it does use beyond it.
    pub demand: u64,
    /// What it has shown to work on, beyond its floor.
    pub workingset: u64,
}

/// A member of the division of one group.
#[derive(Clone, Copy, Default)]
struct Part {
    floor: u64,
    /// Protected beyond the floor.
    extra: u64,
    used: u64,
    demand: u64,
    /// Of a process: what it has shown to work on beyond its floor, within its demand.
    workingset: u64,
    /// The most that it can pass on.
    cap: u64,
}

impl Part {
    fn least(&self) -> u64 {
        self.floor + self.extra
    }

    /// The unmet demand of a member that has `has` bytes. At least 1 if it has any demand, so that
    /// memory that no other member can take still goes to it.
    fn weight(&self, has: u64) -> u64 {
        let met = has.saturating_sub(self.floor);
        self.demand.saturating_sub(met).max(self.demand.min(1))
    }
}

#[derive(Clone, Copy)]
enum PartOf {
    Claim(usize),
    Node(usize),
}

/// What the members of each node are.
struct Members<'a> {
    nodes: &'a [Node],
    claims: &'a [Claim],
    of_node: Vec<Vec<PartOf>>,
    /// Each node as a member of the one above it.
    totals: Vec<Part>,
}

/// What each node needs where no process has more than `level` for its working set.
struct Needs {
    level: u64,
    of_node: Vec<u64>,
}

impl<'a> Members<'a> {
    fn new(nodes: &'a [Node], claims: &'a [Claim]) -> Members<'a> {
        let mut of_node: Vec<Vec<PartOf>> = vec![Vec::new(); nodes.len()];
        for (at, claim) in claims.iter().enumerate() {
            of_node[claim.node].push(PartOf::Claim(at));
        }
        for (at, node) in nodes.iter().enumerate().skip(1) {
            of_node[node.parent].push(PartOf::Node(at));
        }
        let totals = vec![Part::default(); nodes.len()];
        let mut members = Members { nodes, claims, of_node, totals };
        for at in (0..nodes.len()).rev() {
            members.totals[at] = members.total(at);
        }
        members
    }

    /// A node whose members are known.
    fn total(&self, at: usize) -> Part {
        let parts = self.parts(at);
        let sum = |of: fn(&Part) -> u64| {
            parts.iter().fold(0u64, |sum, part| sum.saturating_add(of(part)))
        };
        let Node { low, .. } = self.nodes[at];
        let cap = self.nodes[at].cap.min(sum(|p| p.cap));
        let (floor, used) = (sum(|p| p.floor).min(cap), sum(|p| p.used));
        let protected = sum(Part::least).max(low.min(used)).min(cap);
        let extra = protected.saturating_sub(floor);
        Part { floor, extra, used, demand: sum(|p| p.demand), workingset: 0, cap }
    }

    fn part(&self, member: PartOf) -> Part {
        let claim = match member {
            PartOf::Node(at) => return self.totals[at],
            PartOf::Claim(at) => &self.claims[at],
        };
        Part {
            floor: claim.floor,
            extra: 0,
            used: claim.used,
            demand: claim.demand,
            workingset: claim.workingset.min(claim.demand),
            cap: if claim.demand == 0 { claim.floor } else { u64::MAX },
        }
    }

    fn parts(&self, at: usize) -> Vec<Part> {
        self.of_node[at].iter().map(|member| self.part(*member)).collect()
    }

    fn needs(&self, level: u64) -> Needs {
        let mut needs = Needs { level, of_node: vec![0; self.nodes.len()] };
        for at in (0..self.nodes.len()).rev() {
            let Part { cap, .. } = self.totals[at];
            needs.of_node[at] = self.need_within(at, &needs).max(self.totals[at].least()).min(cap);
        }
        needs
    }

    fn need(&self, member: PartOf, needs: &Needs) -> u64 {
        match member {
            PartOf::Node(at) => needs.of_node[at],
            PartOf::Claim(_) => {
                let part = self.part(member);
                part.floor.saturating_add(part.workingset.min(needs.level)).min(part.cap)
            }
        }
    }

    /// What the members of a node need together.
    fn need_within(&self, at: usize, needs: &Needs) -> u64 {
        let members = self.of_node[at].iter();
        members.fold(0, |sum, member| sum.saturating_add(self.need(*member, needs)))
    }

    /// The needs by which a node with so much divides it, if those at the level above do not fit:
    /// at the highest level at which they leave a part for what goes by demand.
    fn fitting(&self, at: usize, given: u64, above: &Needs) -> Option<Needs> {
        if self.need_within(at, above) <= given {
            return None;
        }
        let least = self.parts(at).iter().fold(0u64, |sum, p| sum.saturating_add(p.least()));
        let spare = given.saturating_sub(least);
        let bound = given - spare / PART_BY_DEMAND_DIVISOR;
        let (mut fits, mut exceeds) = (0, above.level.min(given));
        while exceeds - fits > LEVEL_BYTES {
            let middle = fits + (exceeds - fits) / 2;
            let is_within = self.need_within(at, &self.needs(middle)) <= bound;
            *(if is_within { &mut fits } else { &mut exceeds }) = middle;
        }
        Some(self.needs(fits))
    }
}

/// What each claim gets of `budget`.
pub(crate) fn divide(budget: u64, nodes: &[Node], claims: &[Claim]) -> Vec<u64> {
    let members = Members::new(nodes, claims);
    let mut given = vec![0; nodes.len()];
    let mut result = vec![0; claims.len()];
    if let (Some(own), Some(root)) = (given.first_mut(), nodes.first()) {
        *own = budget.min(root.cap);
    }
    // By what each node's members are given: most often as everywhere.
    let mut levels = vec![members.needs(u64::MAX)];
    let mut level_of = vec![0; nodes.len()];
    for at in 0..nodes.len() {
        level_of[at] = level_of[nodes[at].parent];
        if let Some(needs) = members.fitting(at, given[at], &levels[level_of[at]]) {
            level_of[at] = levels.len();
            levels.push(needs);
        }
        let needs = &levels[level_of[at]];
        let wishes: Vec<u64> =
            members.of_node[at].iter().map(|member| members.need(*member, needs)).collect();
        let shares = share_out(given[at], &members.parts(at), &wishes);
        for (member, share) in members.of_node[at].iter().zip(shares) {
            match member {
                PartOf::Claim(at) => result[*at] = share,
                PartOf::Node(at) => given[*at] = share,
            }
        }
    }
    result
}

/// Divides what one group has over its members; in their order. `wishes`: what each is to have
/// before the rest goes by demand, if all that fits.
fn share_out(whole: u64, parts: &[Part], wishes: &[u64]) -> Vec<u64> {
    let floors = total(parts.iter().map(|p| p.floor));
    if floors >= u128::from(whole) {
        return parts.iter().map(|p| portion(whole, p.floor.into(), floors)).collect();
    }
    let left = whole - floors as u64;
    let extras = total(parts.iter().map(|p| p.extra));
    if extras >= u128::from(left) {
        return parts.iter().map(|p| p.floor + portion(left, p.extra.into(), extras)).collect();
    }
    let wished: Vec<u64> = parts.iter().zip(wishes).map(|(p, wish)| p.least().max(*wish)).collect();
    let mut shares = if total(wished.iter().copied()) <= u128::from(whole) {
        wished
    } else {
        parts.iter().map(Part::least).collect()
    };
    let mut left = whole - shares.iter().sum::<u64>();
    let weights: Vec<u64> = parts.iter().zip(&shares).map(|(p, has)| p.weight(*has)).collect();
    let rooms: Vec<u64> =
        parts.iter().zip(&shares).map(|(p, has)| p.cap.saturating_sub(*has)).collect();
    let mut open: Vec<usize> = (0..parts.len()).filter(|at| weights[*at] > 0).collect();
    loop {
        let all = total(open.iter().map(|at| weights[*at]));
        let due = |at: usize| portion(left, weights[at].into(), all);
        let (full, rest): (Vec<usize>, Vec<usize>) =
            open.iter().partition(|at| due(**at) >= rooms[**at]);
        if full.is_empty() {
            rest.iter().for_each(|at| shares[*at] += due(*at));
            return shares;
        }
        full.iter().for_each(|at| shares[*at] += rooms[*at]);
        left -= full.iter().map(|at| rooms[*at]).sum::<u64>();
        open = rest;
    }
}

fn total(values: impl Iterator<Item = u64>) -> u128 {
    values.map(u128::from).sum()
}

/// `whole * piece / pieces` without overflow; 0 when there are no pieces.
fn portion(whole: u64, piece: u128, pieces: u128) -> u64 {
    (u128::from(whole) * piece).checked_div(pieces).unwrap_or(0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn root() -> Node {
        Node { parent: 0, cap: u64::MAX, low: 0 }
    }

    fn node(parent: usize, cap: u64, low: u64) -> Node {
        Node { parent, cap: cap.saturating_mul(MIB), low: low * MIB }
    }

    fn claim(node: usize, floor: u64, used: u64, demand: u64) -> Claim {
        Claim { node, floor: floor * MIB, used: used * MIB, demand: demand * MIB, workingset: 0 }
    }

    fn mib(shares: &[u64]) -> Vec<u64> {
        shares.iter().map(|share| (share + MIB / 2) / MIB).collect()
    }

    #[test]
    fn without_groups_the_rest_goes_by_demand() {
        let claims = [claim(0, 8, 100, 300), claim(0, 8, 10, 100), claim(0, 4, 4, 0)];
        assert_eq!(mib(&divide(420 * MIB, &[root()], &claims)), [308, 108, 4]);
    }

    #[test]
    fn what_exceeds_a_cap_goes_to_the_others() {
        let nodes = [root(), node(0, 50, 0), node(0, u64::MAX, 0), node(2, 100, 0)];
        let claims = [claim(1, 0, 90, 300), claim(2, 0, 90, 100), claim(3, 0, 90, 600)];
        assert_eq!(mib(&divide(1000 * MIB, &nodes, &claims)), [50, 850, 100]);
        // A cap above binds what is below it together.
        let nodes = [root(), node(0, 60, 0), node(1, u64::MAX, 0)];
        let claims = [claim(1, 0, 90, 100), claim(2, 0, 90, 200)];
        assert_eq!(mib(&divide(1000 * MIB, &nodes, &claims)), [20, 40]);
    }

    #[test]
    fn a_protected_group_keeps_what_it_uses_up_to_its_protection() {
        let nodes = [root(), node(0, u64::MAX, 100), node(0, u64::MAX, 0)];
        let claims = [claim(1, 8, 120, 112), claim(2, 8, 80, 10_000)];
        let shares = mib(&divide(200 * MIB, &nodes, &claims));
        assert!(shares[0] >= 100 && shares[1] <= 100, "{shares:?}");
        // What it does not use is not kept for it.
        let claims = [claim(1, 8, 20, 12), claim(2, 8, 80, 10_000)];
        let shares = mib(&divide(200 * MIB, &nodes, &claims));
        assert!(shares[0] >= 20 && shares[1] >= 175, "{shares:?}");
        // Two protections that do not fit together are both met in part.
        let nodes = [root(), node(0, u64::MAX, 300), node(0, u64::MAX, 100)];
        let claims = [claim(1, 0, 300, 300), claim(2, 0, 100, 100)];
        assert_eq!(mib(&divide(200 * MIB, &nodes, &claims)), [150, 50]);
    }

    #[test]
    fn a_working_set_that_fits_is_not_divided_by_demand() {
        let working = |node, floor, used, demand, workingset| Claim {
            workingset: workingset * MIB,
            ..claim(node, floor, used, demand)
        };
        // Three that no share would do for, one that fits, one that rests.
        let no_share = working(0, 8, 40, 1000, 2000);
        let claims = [no_share, no_share, no_share, working(0, 8, 30, 40, 40), claim(0, 4, 90, 86)];
        assert_eq!(mib(&divide(300 * MIB, &[root()], &claims)), [82, 82, 82, 48, 6]);
        // All fit: the rest goes by the demand that is left.
        let shares = divide(300 * MIB, &[root()], &claims[3..]);
        assert_eq!(mib(&shares), [48, 252]);
        // Processes are equal, groups are not; no protection is touched; and one that lacks nothing
        // has no part for others of its group.
        let nodes = [root(), node(0, u64::MAX, 0), node(0, u64::MAX, 100)];
        let mut claims = vec![
            working(1, 0, 40, 1000, 2000),
            working(1, 0, 40, 1000, 2000),
            working(0, 0, 40, 1000, 2000),
            claim(2, 0, 200, 200),
        ];
        let shares = divide(400 * MIB, &nodes, &claims);
        assert_eq!(mib(&shares), [99, 99, 99, 103]);
        let idle = (0..9).map(|_| working(1, 0, 1, 1, 1));
        claims.extend(idle);
        let more = divide(400 * MIB, &nodes, &claims);
        assert!(more[..4].iter().zip(&shares).all(|(new, old)| old - new < 5 * MIB), "{more:?}");
        // A cap in between is filled as the whole is.
        let nodes = [root(), node(0, 60, 0)];
        let claims =
            [working(1, 0, 30, 1000, 2000), working(1, 0, 10, 20, 20), working(0, 0, 40, 100, 100)];
        let [thrashes, fits, other] = mib(&divide(170 * MIB, &nodes, &claims))[..] else {
            panic!()
        };
        assert!(thrashes + fits == 60 && fits >= 20 && other == 110, "{thrashes} {fits} {other}");
    }

    #[test]
    fn floors_that_do_not_fit_are_met_in_part() {
        let claims = [claim(0, 30, 30, 0), claim(0, 10, 10, 500)];
        assert_eq!(mib(&divide(20 * MIB, &[root()], &claims)), [15, 5]);
    }

    #[test]
    fn no_processes_and_no_memory() {
        assert!(divide(100, &[root()], &[]).is_empty());
        assert!(divide(100, &[], &[]).is_empty());
        assert_eq!(divide(0, &[root()], &[claim(0, 1, 1, 1)]), [0]);
    }

    fn tree() -> impl Strategy<Value = (Vec<Node>, Vec<Claim>)> {
        let node = (
            any::<prop::sample::Index>(),
            prop_oneof![3 => Just(u64::MAX), 4 => 0..2000u64],
            prop_oneof![2 => Just(0), 1 => 0..800u64],
        );
        let nodes = proptest::collection::vec(node, 0..12).prop_map(|list| {
            let mut nodes = vec![root()];
            for (parent, cap, low) in list {
                let parent = parent.index(nodes.len());
                nodes.push(Node { parent, cap: cap.saturating_mul(MIB), low: low * MIB });
            }
            nodes
        });
        let workingset = prop_oneof![Just(0), 0..2000u64];
        let claim = (any::<prop::sample::Index>(), 0..8u64, 0..1000u64, 0..2000u64, workingset);
        (nodes, proptest::collection::vec(claim, 1..24)).prop_map(|(nodes, list)| {
            let claims = list.into_iter().map(|(at, floor, more, demand, workingset)| Claim {
                node: at.index(nodes.len()),
                floor: floor * MIB,
                used: (floor + more) * MIB,
                demand: (more + demand) * MIB,
                workingset: workingset * MIB,
            });
            let claims = claims.collect();
            (nodes, claims)
        })
    }

    fn without_workingsets(claims: Vec<Claim>) -> Vec<Claim> {
        claims.into_iter().map(|claim| Claim { workingset: 0, ..claim }).collect()
    }

    fn below(nodes: &[Node], mut at: usize, ancestor: usize) -> bool {
        loop {
            match at {
                _ if at == ancestor => return true,
                0 => return false,
                _ => at = nodes[at].parent,
            }
        }
    }

    fn sum_in(nodes: &[Node], claims: &[Claim], values: &[u64], group: usize) -> u64 {
        claims
            .iter()
            .zip(values)
            .filter(|(claim, _)| below(nodes, claim.node, group))
            .map(|(_, value)| value)
            .sum()
    }

    proptest! {
        #[test]
        fn nothing_goes_past_a_cap_or_the_budget((nodes, claims) in tree(), budget in 0..8000u64) {
            let shares = divide(budget * MIB, &nodes, &claims);
            prop_assert!(shares.iter().sum::<u64>() <= budget * MIB);
            for (at, node) in nodes.iter().enumerate() {
                prop_assert!(sum_in(&nodes, &claims, &shares, at) <= node.cap, "group {at}");
            }
        }

        #[test]
        fn a_protection_that_fits_is_honoured((nodes, claims) in tree()) {
            // Under caps that leave room for it: here there are none, and the budget holds all
            // floors and all protections.
            let nodes: Vec<Node> =
                nodes.into_iter().map(|node| Node { cap: u64::MAX, ..node }).collect();
            let used: Vec<u64> = claims.iter().map(|claim| claim.used).collect();
            let lows: u64 = nodes.iter().map(|node| node.low).sum();
            let floors: u64 = claims.iter().map(|claim| claim.floor).sum();
            let shares = divide(lows + floors, &nodes, &claims);
            for (at, node) in nodes.iter().enumerate() {
                let kept = node.low.min(sum_in(&nodes, &claims, &used, at));
                let has = sum_in(&nodes, &claims, &shares, at);
                prop_assert!(has + 64 >= kept, "group {at} has {has} and is to keep {kept}");
            }
        }

        #[test]
        fn shares_are_fair_by_demand((nodes, claims) in tree(), budget in 400..8000u64) {
            let claims = without_workingsets(claims);
            let nodes: Vec<Node> =
                nodes.into_iter().map(|node| Node { cap: u64::MAX, low: 0, ..node }).collect();
            let budget = budget * MIB;
            let shares = divide(budget, &nodes, &claims);
            let floors: u64 = claims.iter().map(|claim| claim.floor).sum();
            let demanded: u64 = claims.iter().map(|claim| claim.demand).sum();
            for (claim, share) in claims.iter().zip(&shares) {
                let fair = claim.floor as f64
                    + (budget - floors) as f64 * claim.demand as f64 / demanded.max(1) as f64;
                prop_assert!(
                    (*share as f64 - fair).abs() <= fair / 10.0 + 64.0,
                    "{share} of \
                    {fair}"
                );
            }
        }

        #[test]
        fn neighbours_below_their_caps_have_equal_shares_of_their_demand(
            (nodes, claims) in tree(),
            budget in 0..8000u64,
        ) {
            let claims = without_workingsets(claims);
            let nodes: Vec<Node> = nodes.into_iter().map(|node| Node { low: 0, ..node }).collect();
            let shares = divide(budget * MIB, &nodes, &claims);
            // Processes of one group have no caps of their own: each has the same part of its
            // demand, if all have their floors.
            for (a, x) in claims.iter().zip(&shares) {
                for (b, y) in claims.iter().zip(&shares) {
                    if a.node == b.node
                        && *x > a.floor
                        && *y > b.floor
                        && a.demand > 0
                        && b.demand > 0
                    {
                        let (one, other) = (
                            (x - a.floor) as f64 / a.demand as f64,
                            (y - b.floor) as f64 / b.demand as f64,
                        );
                        prop_assert!(
                            (one - other).abs() <= one.max(other) / 10.0 + 1e-4,
                            "{one} and {other}"
                        );
                    }
                }
            }
        }

        #[test]
        fn no_working_set_is_cut_for_a_larger_one((_, claims) in tree(), budget in 0..8000u64) {
            let claims: Vec<Claim> =
                claims.into_iter().map(|claim| Claim { node: 0, ..claim }).collect();
            let shares = divide(budget * MIB, &[root()], &claims);
            let floors: u64 = claims.iter().map(|claim| claim.floor).sum();
            if floors > budget * MIB {
                return Ok(());
            }
            let spare = budget * MIB - floors;
            for (claim, share) in claims.iter().zip(&shares) {
                let beyond = share.saturating_sub(claim.floor) + 2 * LEVEL_BYTES;
                let wants = |claim: &Claim| claim.workingset.min(claim.demand);
                if beyond < wants(claim) {
                    // If all had no more than this one, three quarters would be given.
                    let given: u64 = claims.iter().map(|claim| wants(claim).min(beyond)).sum();
                    prop_assert!(given >= spare - spare / 4, "{given} of {spare}");
                }
            }
        }

        #[test]
        fn free_memory_goes_where_demand_is((nodes, claims) in tree(), budget in 0..8000u64) {
            // Work-conserving: if something is left over, every member that wants more is below a
            // cap that is reached.
            let shares = divide(budget * MIB, &nodes, &claims);
            let left = budget * MIB - shares.iter().sum::<u64>();
            let rounding = (claims.len() + nodes.len()) as u64 * 4;
            for claim in claims.iter().filter(|claim| claim.demand > 0 && left > rounding) {
                let bound = (0..nodes.len()).any(|at| {
                    let has = sum_in(&nodes, &claims, &shares, at);
                    below(&nodes, claim.node, at) && nodes[at].cap.saturating_sub(has) <= rounding
                });
                prop_assert!(bound, "{left} is left over");
            }
        }
    }
}
