//! Files of /proc, of whatever content and in whatever pieces.
#![no_main]

use libfuzzer_sys::fuzz_target;
use swaptide_host::cgroup::tree::memory_cgroup;
use swaptide_sys::maps::{MIN_BUFFER, for_each_vma_in};
use swaptide_sys::process::{parse_stat, parse_statm};
use swaptide_sys::procfs::{kib_field, parse_hex, parse_u64, words};

fn vmas(text: &[u8], chunk: usize, buffer: usize) -> Vec<(usize, usize, bool, u64, Vec<u8>)> {
    let (mut rest, mut found) = (text, Vec::new());
    let read = |space: &mut [u8]| {
        let n = chunk.min(space.len()).min(rest.len());
        space[..n].copy_from_slice(&rest[..n]);
        rest = &rest[n..];
        Ok(n)
    };
    for_each_vma_in(&mut vec![0; buffer], read, |vma| {
        let _ = (vma.is_private_anon(), vma.range.len());
        found.push((vma.range.start.0, vma.range.end.0, vma.write, vma.inode, vma.name.to_vec()));
        found.len() < 1000
    })
    .expect("nothing fails here");
    found
}

fuzz_target!(|data: &[u8]| {
    let Some((first, text)) = data.split_first() else { return };
    let whole = vmas(text, usize::MAX, text.len().max(MIN_BUFFER) + 1);
    assert_eq!(
        vmas(text, 1 + usize::from(*first), text.len().max(MIN_BUFFER) + 1),
        whole,
        "however it comes in pieces"
    );
    // Lines longer than the buffer come cut short, but no line is lost or made up.
    let cut = vmas(text, 1 + usize::from(*first), MIN_BUFFER);
    assert!(
        cut.len() >= whole.iter().filter(|(.., name)| name.len() < 100).count().min(1000)
            || text.split(|b| *b == b'\n').any(|line| line.len() >= MIN_BUFFER)
    );
    let _ = (
        parse_stat(1, text),
        parse_statm(text),
        kib_field(text, "Pss_Anon"),
        kib_field(text, "MemTotal"),
    );
    for word in words(text) {
        assert!(!word.is_empty());
        if let Some(number) = parse_u64(word) {
            assert!(
                word.iter().all(u8::is_ascii_digit)
                    && (word[0] == b'0' || number.to_string().as_bytes() == word)
            );
        }
        assert!(parse_hex(word).is_none() || word.iter().all(u8::is_ascii_hexdigit));
    }
    if let Ok(text) = std::str::from_utf8(text)
        && let Some(cgroup) = memory_cgroup(text)
    {
        assert!(!cgroup.contains('\n') && text.contains(cgroup));
    }
});
