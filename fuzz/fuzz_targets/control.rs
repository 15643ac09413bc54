//! What comes through a run's control socket: lines of JSON, and what they do to groups and tiers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use swaptide_fuzz::empty_segment;
use swaptide_host::cgroup::tree::{GroupPath, GroupTree, KEYS};
use swaptide_host::control::server::Question;
use swaptide_host::swap::spec;
use swaptide_ipc::MAX_GROUPS;

const RAM: u64 = 1 << 34;

fuzz_target!(|text: &str| {
    let mut groups: Option<GroupTree> = None;
    for line in text.lines().take(32) {
        let Ok(question) = serde_json::from_str::<Question>(line) else { continue };
        // What is understood says the same again.
        let again = serde_json::to_string(&question).expect("a question is text");
        assert_eq!(
            serde_json::from_str::<Question>(&again).expect("which is a question"),
            question
        );
        let groups = groups.get_or_insert_with(|| GroupTree::new(empty_segment().0, RAM));
        let views = |groups: &GroupTree| {
            groups.iter().map(|(index, _)| groups.view(index)).collect::<Vec<_>>()
        };
        match question {
            Question::Swapon(text) => drop(spec::parse(&text)),
            Question::Tiers(Some(text)) => {
                let before = (*groups.tiers(), views(groups));
                if groups.set_tiers(&text).is_err() {
                    assert_eq!(before, (*groups.tiers(), views(groups)));
                }
            }
            Question::Group { path, set } => {
                let Ok(path) = GroupPath::parse(&path) else { continue };
                let Ok(index) = groups.ensure(&path, 1000) else { continue };
                let before = views(groups);
                let pairs = set.iter().map(|(key, value)| (key.as_str(), value.as_str()));
                if let Err(error) = groups.set(index, pairs) {
                    assert!(!error.to_string().contains('\n'));
                    assert_eq!(views(groups), before, "refused, and changed");
                }
                // What a group says of itself can be said to it.
                let (settings, tiers) =
                    (groups.get(index).expect("made").settings, *groups.tiers());
                let said: Vec<(&str, String)> = KEYS
                    .iter()
                    .filter_map(|key| Some((*key, settings.as_set(key, &tiers)?)))
                    .collect();
                let before = views(groups);
                groups
                    .set(index, said.iter().map(|(key, value)| (*key, value.as_str())))
                    .expect("its own settings");
                assert_eq!(views(groups), before);
            }
            Question::Remove(path) => {
                let Ok(path) = GroupPath::parse(&path) else { continue };
                let _ = groups.remove(&path);
                assert!(path.as_str() != "/" || groups.find(&path).is_ok(), "the root stays");
            }
            Question::Reclaim { path, .. } | Question::Freeze(path) | Question::Preload(path) => {
                drop(
                    GroupPath::parse(&path)
                        .map(|path| (path.depth(), path.parent(), groups.find(&path))),
                );
            }
            _ => {}
        }
        assert!(groups.iter().count() <= MAX_GROUPS);
    }
});
