//! Areas without a cipher.

use super::*;

#[test]
fn plain_pages_checked_at_their_place() {
    let disk = Disk::default();
    let source = Source { plain: true, ..Source::new(2) };
    let device = device(&disk, &source);
    // Pages that do not compress, more than one extent has: so some go to each.
    let pages: Vec<(u32, Box<Page>)> = (0..600).map(|slot| (slot, raw_page(slot + 1))).collect();
    for batch in pages.chunks(30) {
        write_pages(&device, batch).unwrap();
    }
    let found = |page: &Page| {
        disk.0.lock().unwrap().pages.iter().find(|(_, block)| ***block == *page).map(|(at, _)| *at)
    };
    let mut plain = 0;
    for (slot, page) in &pages {
        let mut out = [0; PAGE_SIZE];
        device.read(&mut [(Slot(*slot), &mut out)]).unwrap();
        assert!(out == **page);
        if let Some(at) = found(page) {
            assert_eq!(
                at as usize / EXTENT_PAGES,
                1,
                "slot {slot} lies there unencrypted where it should not"
            );
            plain += 1;
        }
    }
    assert!((80..=512).contains(&plain), "{plain} pages lie as they are");
    let (slot, page) = pages.iter().find(|(_, page)| found(page).is_some()).unwrap();
    let (other, _) = pages.iter().rfind(|(_, page)| found(page).is_some()).unwrap();
    let fails = |slot: u32| device.read(&mut [(Slot(slot), &mut [0; PAGE_SIZE])]).unwrap_err().kind;
    // A flipped bit, and another page's block in its place.
    let at = found(page).unwrap();
    disk.0.lock().unwrap().pages.get_mut(&at).unwrap()[77] ^= 4;
    assert_eq!(fails(*slot), ReadErrorKind::Authentication);
    let there = found(&pages[*other as usize].1).unwrap();
    let block = disk.0.lock().unwrap().pages[&there].clone();
    disk.0.lock().unwrap().pages.insert(at, block);
    assert_eq!(fails(*slot), ReadErrorKind::Authentication);
    disk.0.lock().unwrap().pages.insert(at, page.clone());
    let mut out = [0; PAGE_SIZE];
    device.read(&mut [(Slot(*slot), &mut out)]).unwrap();
    assert!(out == **page);
}
