//! Configuration files: read whole or refused with one line, and what is read can be carried out.
#![no_main]

use libfuzzer_sys::fuzz_target;
use swaptide_fuzz::empty_segment;
use swaptide_host::cgroup::tree::GroupTree;
use swaptide_host::config::Config;

const RAM: u64 = 1 << 34;

fuzz_target!(|text: &str| {
    match Config::parse(text, RAM) {
        Err((line, what)) => {
            assert!(line <= 1 + text.bytes().filter(|byte| *byte == b'\n').count());
            assert!(!what.contains('\n'), "one line: {what:?}");
        }
        Ok(config) => {
            assert_eq!(config.swap.len(), config.devices.len());
            let mut groups = GroupTree::new(empty_segment().0, RAM);
            let first = config.apply(&mut groups, 1000);
            let views = |groups: &GroupTree| {
                groups.iter().map(|(index, _)| groups.view(index)).collect::<Vec<_>>()
            };
            let before = views(&groups);
            if first.is_ok() {
                for plan in &config.groups {
                    let index = groups.find(&plan.path).expect("a group of the file is there");
                    assert_eq!(
                        groups.get(index).expect("found").settings.ram_max,
                        plan.settings.ram_max
                    );
                }
                config.apply(&mut groups, 1000).expect("the same again");
                assert_eq!(views(&groups), before, "the same file again changes nothing");
            } else {
                assert_eq!(before.len(), 1, "refused, and yet a group was made");
            }
        }
    }
});
