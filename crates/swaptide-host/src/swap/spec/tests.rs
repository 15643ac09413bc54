use super::*;
use crate::testing::Scratch;
use std::os::unix::fs::{FileExt, MetadataExt};

#[test]
fn a_cipher_can_be_switched_off_for_what_leaves_memory() {
    for (text, plain, priority) in [
        ("file:/var/tmp", false, None),
        ("file:/var/tmp,cipher=none", true, None),
        ("file:/var/tmp:1G,cipher=none,prio=7", true, Some(7)),
        ("/dev/sdb2,prio=7,cipher=none", true, Some(7)),
        ("nbd://host/x?connections=2,cipher=aes-256-gcm", false, None),
    ] {
        let device = parse(text).expect(text);
        assert_eq!((device.plain, device.priority), (plain, priority), "{text}");
        assert!(!device.name().contains("cipher"), "{text}");
    }
    assert!(matches!(parse("file:/a,cipher=rot13"), Err(DeviceError::Cipher(..))));
    assert!(matches!(parse("file:/a,cipher=none,cipher=none"), Err(DeviceError::Cipher(..))));
    assert!(matches!(parse("zram:1G,cipher=none"), Err(DeviceError::CipherOfZram(_))));
    assert!(matches!(parse("file:/a,prio=1,prio=2"), Err(DeviceError::Priority(_))));
}

#[test]
fn devices_are_read_as_documented() {
    let acceptance = PoolAcceptance::default();
    let zram = DeviceKind::Zram { bytes: 1 << 30, codec: Scheme::default(), acceptance };
    assert_eq!(
        parse("zram:1G").expect("zram"),
        Device { kind: zram.clone(), priority: None, mirror: None, plain: false, rotational: None }
    );
    assert_eq!(
        parse("zram:1G,prio=-1").expect("zram"),
        Device { kind: zram, priority: Some(-1), mirror: None, plain: false, rotational: None }
    );
    let levels =
        Level::new(3).map(|level| (Scheme { choice: Choice::Zstd, level }, "zstd,level=3"));
    let schemes =
        Choice::ALL.map(|choice| (choice.into(), choice.name())).into_iter().chain(levels);
    for (codec, name) in schemes {
        let kind = DeviceKind::Zram { bytes: 1 << 30, codec, acceptance };
        assert_eq!(
            parse(&format!("zram:1G,codec={name}")).expect("codec"),
            Device {
                kind: kind.clone(),
                priority: None,
                mirror: None,
                plain: false,
                rotational: None
            }
        );
        assert_eq!(
            parse(&format!("zram:1G,codec={name},prio=3")).expect("codec"),
            Device { kind, priority: Some(3), mirror: None, plain: false, rotational: None }
        );
    }
    let acceptance =
        PoolAcceptance { max_pool_percent: Some(20), accept_threshold_percent: Some(100) };
    let refusing = DeviceKind::Zram { bytes: 1 << 30, codec: Choice::Lz4.into(), acceptance };
    for order in [
        "codec=lz4,max_pool_percent=20,accept_threshold_percent=100",
        "accept_threshold_percent=100,codec=lz4,max_pool_percent=20",
    ] {
        let device = parse(&format!("zram:1G,{order},prio=7")).expect("options");
        assert_eq!(
            device,
            Device {
                kind: refusing.clone(),
                priority: Some(7),
                mirror: None,
                plain: false,
                rotational: None
            }
        );
    }
    let file = |path: &str, bytes| DeviceKind::File { path: PathBuf::from(path), bytes };
    assert_eq!(parse("file:/var/tmp").expect("file").kind, file("/var/tmp", None));
    assert_eq!(parse("file:/var/tmp:2G").expect("file").kind, file("/var/tmp", Some(2 << 30)));
    assert_eq!(parse("file:/a:b/c").expect("file").kind, file("/a:b/c", None));
    assert_eq!(parse("file:/a:b/c:64M").expect("file").kind, file("/a:b/c", Some(64 << 20)));
}

#[test]
fn invalid_device_refused_with_reason() {
    for (text, part) in [
        ("", "not a device"),
        ("zram", "not a device"),
        ("zram:", "not a size"),
        ("zram:12Q", "not a size"),
        ("zram:50%", "not allowed here"),
        ("zram:1K", "too small"),
        ("file:", "not a device"),
        ("file:/x:1M", "too small"),
        ("file:/x:9T", "too large"),
        ("file:/x:lots", "not a size"),
        ("zram:1G,prio=high", "prio=N"),
        ("zram:1G,codec=lzo-rle", "there is no codec \"lzo-rle\"; use lz4+zstd, lz4, zstd, snappy"),
        ("zram:1G,codec=", "there is no codec"),
        ("zram:1G,codec=zstd,level=10", "there is no level \"10\" of zstd; use 1 to 9"),
        ("zram:1G,level=0", "no level"),
        ("zram:1G,level=", "no level"),
        ("zram:1G,level=3,codec=lz4", "needs a codec with zstd"),
        ("zram:1G,level=3,codec=snappy", "needs a codec with zstd"),
        ("zram:1G,levels=3", "no option of zram"),
        ("zram:1G,max_pool_percent=0", "no option of zram"),
        ("zram:1G,max_pool_percent=101", "no option of zram"),
        ("zram:1G,accept_threshold_percent", "no option of zram"),
        ("zram:1G,accept_threshold_percent=many", "no option of zram"),
        ("file:/x,codec=zstd", "codec= is for zram"),
        ("file:/x:1G,codec=zstd", "codec= is for zram"),
        ("zram:1G,prio=-2", "from -1 to 32767"),
        ("nb\n://host,mirror=", "no mirror"),
        ("nbd://", "host"),
        ("nbd+unix:///x", "socket=PATH"),
    ] {
        let error = parse(text).expect_err(text).to_string();
        assert!(error.contains(part), "{text}: {error}");
        assert!(!error.contains('\n'));
    }
}

#[test]
fn one_zram_first_and_any_number_of_other_devices() {
    let devices = |texts: &[&str]| -> Vec<Device> {
        texts.iter().map(|t| parse(t).expect("device")).collect()
    };
    let refused = |texts: &[&str]| open(&devices(texts), 1 << 30).expect_err("refused").to_string();
    assert!(refused(&["zram:1G", "zram:1G"]).contains("more than one zram"));
    assert!(
        refused(&["zram:1G,prio=1", "file:/tmp,prio=2"])
            .contains("\"file:/tmp\" has a higher priority")
    );
    assert!(refused(&["file:/tmp:16M"; 17]).contains("more than 16"));
    let two =
        open(&devices(&["file:/var/tmp:16M,prio=3", "file:/tmp:32M"]), 1 << 30).expect("two files");
    let told: Vec<_> =
        two.devices.iter().map(|b| (b.name.as_str(), b.priority, b.extents)).collect();
    assert_eq!(told, [("file:/var/tmp", 3, 8), ("file:/tmp", -1, 16)]);
    let only_memory = open(&devices(&["zram:1G"]), 1 << 30).expect("zram");
    assert!(only_memory.devices.is_empty() && only_memory.pool_cap == 1 << 30);
}

#[test]
fn the_file_has_no_name_takes_no_space_and_can_be_written() {
    let scratch = Scratch::new("device");
    for path in [scratch.root().to_owned(), scratch.path("swap")] {
        let space = open(
            &[Device {
                kind: DeviceKind::File { path, bytes: Some(64 << 20) },
                priority: None,
                mirror: None,
                plain: false,
                rotational: None,
            }],
            1 << 30,
        )
        .expect("file");
        let swap = &space.devices[0];
        assert_eq!(swap.extents, 32);
        let Medium::File(file) = &swap.medium else { panic!("no file") };
        let metadata = file.metadata().expect("metadata");
        assert_eq!((metadata.nlink(), metadata.len(), metadata.blocks()), (0, 64 << 20, 0));
        // Direct I/O wants aligned memory: a page of this process's own.
        let page = swaptide_sys::mem::Mapping::reserve(4096).expect("page");
        // SAFETY: the mapping is 4096 bytes long and readable, and nothing else refers to it.
        let bytes = unsafe { std::slice::from_raw_parts(page.as_ptr(), 4096) };
        let Medium::File(file) = &swap.medium else { panic!("no file") };
        assert_eq!(file.write_at(bytes, 4096).expect("write"), 4096);
    }
    assert_eq!(
        std::fs::read_dir(scratch.root()).expect("list").count(),
        0,
        "nothing is left behind"
    );
}

#[test]
fn unmarked_block_device_refused() {
    let refused = |path: &str| {
        open(
            &[Device {
                kind: DeviceKind::Block { path: path.into() },
                priority: None,
                mirror: None,
                plain: false,
                rotational: None,
            }],
            1 << 30,
        )
        .expect_err("refused")
        .to_string()
    };
    assert!(refused("/dev/null").contains("not a block device"));
    assert!(refused("/no/such/device").contains("cannot be used"));
}

#[test]
fn unusable_place_for_swap_file_refused() {
    let scratch = Scratch::new("refused");
    let taken = scratch.path("taken");
    std::fs::write(&taken, "mine").expect("write");
    let refused = |path: PathBuf, bytes| {
        open(
            &[Device {
                kind: DeviceKind::File { path, bytes },
                priority: None,
                mirror: None,
                plain: false,
                rotational: None,
            }],
            1 << 30,
        )
        .expect_err("refused")
        .to_string()
    };
    assert!(refused(taken.clone(), None).contains("exists already"));
    assert_eq!(std::fs::read_to_string(taken).expect("read"), "mine");
    assert!(refused(scratch.path("no/such/directory"), None).contains("cannot create a swap file"));
    assert!(refused(PathBuf::from("/proc"), None).contains("/proc"));
    let free = free_space(scratch.root()).expect("statvfs");
    if free < MAX_FILE_BYTES {
        assert!(refused(scratch.root().to_owned(), Some(MAX_FILE_BYTES)).contains("too small"));
    }
}

#[test]
fn paths_sent_to_other_runs_are_absolute() {
    let here = std::env::current_dir().expect("a directory").display().to_string();
    for (text, told) in [
        ("file:swap:1G", format!("file:{here}/swap:1G")),
        ("file:/swap", "file:/swap".into()),
        ("nbd://host/export,mirror=a/place", format!("nbd://host/export,mirror={here}/a/place")),
        ("nbd+unix:///x?socket=/run/s", "nbd+unix:///x?socket=/run/s".into()),
    ] {
        assert_eq!(absolute(text).expect(text), told);
    }
    let refused = absolute("nbd+unix:///x?socket=s");
    assert!(matches!(refused, Err(DeviceError::RelativeUrl(_))), "{refused:?}");
}
