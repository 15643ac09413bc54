//! The network tier against real servers: what is agreed on, data in and out, delay, errors, death
//! and return.

mod authority;
mod servers;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use authority::Authority;
use servers::{Scratch, Server, have};
use swaptide_host::nbd::{Connector, LocalDialer, NbdError, Url};
use swaptide_store::codec::{Compressor, Packed};
use swaptide_store::file::{Extent, ExtentSource, FileDevice, ReadErrorKind};
use swaptide_store::nbd::{Export, Flags, Nbd, Options};
use swaptide_store::{PAGE_SIZE, Page, Slot};
use swaptide_sys::Errno;

const PAGE: u64 = PAGE_SIZE as u64;
const MIB: u64 = 1 << 20;

fn connector(url: &str) -> Result<Connector, NbdError> {
    Connector::new(url.parse::<Url>().unwrap_or_else(|error| panic!("{error}")))
}

fn connect(url: &str) -> Result<(Export, Nbd), NbdError> {
    connect_with(url, Options::default())
}

fn connect_with(url: &str, options: Options) -> Result<(Export, Nbd), NbdError> {
    let (first, export) = connector(url)?.connect()?;
    let dialer = LocalDialer::new(connector(url)?, export);
    Ok((export, Nbd::new(export, options, Box::new(dialer), vec![first])))
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 ^ (self.0 >> 29)
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 16) % n
    }
}

/// Contents that tell which block they are and of which version.
fn contents(block: u64, version: u64) -> Page {
    let mut numbers = Random(block << 20 ^ version);
    let mut page = [0; PAGE_SIZE];
    for word in page.as_chunks_mut::<8>().0 {
        *word = numbers.next().to_ne_bytes();
    }
    page
}

/// Batches of writes, trims and reads at random blocks, checked against what each block has to
/// hold.
struct Exercise<'n> {
    nbd: &'n Nbd,
    blocks: u64,
    versions: HashMap<u64, u64>,
    numbers: Random,
    version: u64,
}

impl<'n> Exercise<'n> {
    fn new(nbd: &'n Nbd, blocks: u64) -> Exercise<'n> {
        Exercise { nbd, blocks, versions: HashMap::new(), numbers: Random(blocks), version: 0 }
    }

    fn blocks(&mut self, n: u64) -> Vec<u64> {
        let mut some: Vec<u64> = (0..n).map(|_| self.numbers.below(self.blocks)).collect();
        some.sort_unstable();
        some.dedup();
        some
    }

    fn write(&mut self, n: u64) {
        let blocks = self.blocks(n);
        self.version += 1;
        let pages: Vec<Page> = blocks.iter().map(|block| contents(*block, self.version)).collect();
        let places: Vec<(u64, &[u8])> =
            blocks.iter().zip(&pages).map(|(block, page)| (block * PAGE, &page[..])).collect();
        self.nbd.write_many(&places).expect("write");
        self.versions.extend(blocks.iter().map(|block| (*block, self.version)));
    }

    fn read(&mut self, n: u64) {
        let blocks = self.blocks(n);
        let mut pages = vec![[0u8; PAGE_SIZE]; blocks.len()];
        let mut places: Vec<(u64, &mut [u8])> = blocks
            .iter()
            .zip(&mut pages)
            .map(|(block, page)| (block * PAGE, &mut page[..]))
            .collect();
        self.nbd.read_many(&mut places).expect("read");
        for (block, page) in blocks.iter().zip(&pages) {
            if let Some(version) = self.versions.get(block) {
                assert!(
                    *page == contents(*block, *version),
                    "block {block} is not what was written"
                );
            }
        }
    }

    fn read_all(&mut self) {
        let mut bytes = vec![0; (self.blocks * PAGE) as usize];
        assert_eq!(self.nbd.read_at(0, &mut bytes), Ok(bytes.len()));
        for (block, version) in &self.versions {
            let page = &bytes[(block * PAGE) as usize..][..PAGE_SIZE];
            assert!(*page == contents(*block, *version), "block {block} is not what was written");
        }
    }

    fn trim(&mut self, n: u64) {
        for block in self.blocks(n) {
            self.nbd.trim(block * PAGE, PAGE).expect("trim");
            self.versions.remove(&block);
        }
    }

    fn run(&mut self, rounds: u32) {
        for round in 0..rounds {
            self.write(1 + u64::from(round) * 7 % 64);
            self.read(1 + u64::from(round) * 11 % 64);
            if self.nbd.export().flags.contains(Flags::SEND_TRIM) {
                self.trim(3);
            }
        }
        self.nbd.flush().expect("flush");
        self.read_all();
    }
}

#[test]
fn nbdkit_agrees_on_everything_and_keeps_what_it_is_given() {
    if !have("nbdkit") {
        return;
    }
    let scratch = Scratch::new("kit");
    let server = Server::nbdkit(&scratch, &["memory", "32M"]);
    let (export, nbd) = connect(&server.url("nbd", "", "")).unwrap();
    assert_eq!((export.size, export.structured, export.connections), (32 * MIB, true, 4));
    for flag in [Flags::SEND_FLUSH, Flags::SEND_FUA, Flags::SEND_TRIM, Flags::CAN_MULTI_CONN] {
        assert!(export.flags.contains(flag), "{export:?}");
    }
    Exercise::new(&nbd, 32 * MIB / PAGE).run(60);
    let stats = nbd.stats();
    assert_eq!((stats.broken, stats.replayed, stats.refused), (0, 0, 0), "{stats:?}");
    assert_eq!(stats.dialed, 3);
}

#[test]
fn an_export_is_found_on_the_network_by_its_name() {
    if !have("nbdkit") {
        return;
    }
    let scratch = Scratch::new("tcp");
    // A port that is free; another program may take it before the server does.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|l| l.local_addr())
        .unwrap()
        .port()
        .to_string();
    let args = [
        "-p",
        &port,
        "-i",
        "127.0.0.1",
        "--filter=exportname",
        "memory",
        "8M",
        "exportname-strict=true",
        "exportname=a b",
    ];
    let mut relay = std::process::Command::new("nbdkit")
        .arg("-f")
        .arg("--exit-with-parent")
        .args(args)
        .spawn()
        .unwrap();
    let url = format!("nbd://localhost:{port}/a%20b?connections=2");
    let deadline = Instant::now() + Duration::from_secs(30);
    let (export, nbd) = loop {
        match connect(&url) {
            Ok(both) => break both,
            Err(NbdError::Connect(..)) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10))
            }
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!((export.size, export.connections), (8 * MIB, 2));
    Exercise::new(&nbd, 8 * MIB / PAGE).run(20);
    let other = connect(&format!("nbd://localhost:{port}/other")).map(drop).unwrap_err();
    assert!(matches!(&other, NbdError::Refused { .. }), "{other}");
    relay.kill().unwrap();
    relay.wait().unwrap();
    let gone = connect(&url).map(drop).unwrap_err();
    assert!(gone.to_string().contains("check that the server runs"), "{gone}");
    drop(scratch);
}

#[test]
fn older_servers_are_asked_in_the_old_way() {
    if !have("nbdkit") {
        return;
    }
    for (args, structured) in [
        (&["--no-sr"][..], false),
        (&["--mask-handshake=0"], false),
        (&["--mask-handshake=1"], true),
    ] {
        let scratch = Scratch::new("old");
        let server = Server::nbdkit(&scratch, &[args, &["memory", "8M"]].concat());
        let (export, nbd) = connect(&server.url("nbd", "", "")).unwrap();
        assert_eq!((export.size, export.structured), (8 * MIB, structured), "{args:?}");
        Exercise::new(&nbd, 8 * MIB / PAGE).run(10);
    }
    let scratch = Scratch::new("oldest");
    let server = Server::nbdkit(&scratch, &["-o", "memory", "8M"]);
    let error = connect(&server.url("nbd", "", "")).map(drop).unwrap_err();
    assert!(error.to_string().contains("start it in newstyle mode"), "{error}");
}

#[test]
fn qemu_agrees_on_everything_and_keeps_what_it_is_given() {
    if !have("qemu-nbd") {
        return;
    }
    let scratch = Scratch::new("qemu");
    // Not a whole number of pages: the rest is not used.
    let file = scratch.file("disk", 32 * MIB + 512);
    let file = file.to_str().unwrap();
    let server =
        Server::qemu(&scratch, &["-f", "raw", "-x", "swap", "--shared=8", "--discard=unmap", file]);
    let (export, nbd) = connect(&server.url("nbd", "swap", "")).unwrap();
    assert_eq!((export.size, export.structured), (32 * MIB, true));
    assert!(export.flags.contains(Flags::SEND_TRIM), "{export:?}");
    Exercise::new(&nbd, 32 * MIB / PAGE).run(60);
    let stats = nbd.stats();
    assert_eq!((stats.broken, stats.replayed, stats.refused), (0, 0, 0), "{stats:?}");
    let error = connect(&server.url("nbd", "swop", "")).map(drop).unwrap_err();
    assert!(error.to_string().contains("no export of that name"), "{error}");
}

#[test]
fn exports_that_cannot_be_swapped_to_are_refused() {
    if !have("nbdkit") {
        return;
    }
    for (args, part) in [
        (&["-r", "memory", "8M"][..], "the export is read-only"),
        (&["memory", "0"], "smaller than a page"),
        (
            &[
                "--filter=blocksize-policy",
                "memory",
                "8M",
                "blocksize-minimum=8192",
                "blocksize-preferred=8192",
            ],
            "8192",
        ),
    ] {
        let scratch = Scratch::new("unfit");
        let server = Server::nbdkit(&scratch, args);
        let error = connect(&server.url("nbd", "", "")).map(drop).unwrap_err();
        assert!(error.to_string().contains(part), "{args:?}: {error}");
    }
    let scratch = Scratch::new("sizes");
    let policy = [
        "blocksize-minimum=512",
        "blocksize-preferred=4096",
        "blocksize-maximum=65536",
        "blocksize-error-policy=error",
    ];
    let server = Server::nbdkit(
        &scratch,
        &[&["--filter=blocksize-policy", "memory", "8M"][..], &policy].concat(),
    );
    let (export, nbd) = connect(&server.url("nbd", "", "")).unwrap();
    assert_eq!(export.longest, 65536);
    Exercise::new(&nbd, 8 * MIB / PAGE).run(10);
}

#[test]
fn delay_is_paid_once_for_all_that_is_in_flight() {
    if !have("nbdkit") {
        return;
    }
    let scratch = Scratch::new("delay");
    let server = Server::nbdkit(
        &scratch,
        &["--filter=delay", "memory", "8M", "rdelay=100ms", "wdelay=100ms", "-t", "64"],
    );
    let (_, nbd) = connect(&server.url("nbd", "", "")).unwrap();
    let mut exercise = Exercise::new(&nbd, 8 * MIB / PAGE);
    let start = Instant::now();
    exercise.write(64);
    exercise.read(64);
    // One by one it would be 12 s.
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

#[test]
fn errors_of_the_server_come_through_and_go_away() {
    if !have("nbdkit") {
        return;
    }
    let scratch = Scratch::new("error");
    let (reads, writes) = (scratch.path("reads-fail"), scratch.path("writes-fail"));
    let args = [
        "--filter=error".to_owned(),
        "memory".to_owned(),
        "8M".to_owned(),
        "error-pread=EIO".to_owned(),
        "error-pread-rate=100%".to_owned(),
        format!("error-pread-file={}", reads.display()),
        "error-pwrite=ENOSPC".to_owned(),
        "error-pwrite-rate=100%".to_owned(),
        format!("error-pwrite-file={}", writes.display()),
    ];
    let server = Server::nbdkit(&scratch, &args.iter().map(String::as_str).collect::<Vec<_>>());
    let (_, nbd) = connect(&server.url("nbd", "", "")).unwrap();
    nbd.write_at(0, &[7; 8192]).unwrap();
    std::fs::write(&reads, "").unwrap();
    std::fs::write(&writes, "").unwrap();
    assert_eq!(nbd.read_at(0, &mut [0; 8192]), Err(Errno::IO));
    assert_eq!(nbd.write_at(0, &[8; 8192]), Err(Errno::NOSPC));
    std::fs::remove_file(&reads).unwrap();
    std::fs::remove_file(&writes).unwrap();
    let mut back = [0; 8192];
    assert_eq!(nbd.read_at(0, &mut back), Ok(8192));
    assert_eq!(back, [7; 8192]);
    let stats = nbd.stats();
    assert_eq!((stats.refused, stats.broken), (2, 0), "{stats:?}");
}

/// Exercises an export whose server is killed and started again all the time.
fn survive(server: &mut Server, url: &str, blocks: u64) {
    let patient = Options {
        read_timeout: Duration::from_secs(60),
        write_timeout: Duration::from_secs(60),
        ..Options::default()
    };
    let (_, nbd) = connect_with(url, patient).unwrap();
    let (stop, rounds) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|s| {
        let worker = s.spawn(|| {
            let mut exercise = Exercise::new(&nbd, blocks);
            while !stop.load(SeqCst) {
                exercise.write(48);
                exercise.read(48);
                rounds.fetch_add(1, SeqCst);
            }
            exercise.read_all();
        });
        // Until something had to be sent again, in reads and writes, a few times.
        let start = Instant::now();
        for kill in 0u64.. {
            let enough = kill >= 8 && nbd.stats().replayed >= 100 && nbd.stats().broken >= 5;
            if enough || worker.is_finished() || start.elapsed() > Duration::from_secs(60) {
                break;
            }
            std::thread::sleep(Duration::from_millis(30 + kill * 37 % 100));
            server.kill();
            std::thread::sleep(Duration::from_millis(kill * 53 % 150));
            server.start_again();
        }
        stop.store(true, SeqCst);
        worker.join().expect("the data is what was written");
    });
    let stats = nbd.stats();
    assert!(stats.replayed >= 100 && stats.broken >= 5, "{stats:?} in {rounds:?} rounds");
    assert_eq!((stats.given_up, stats.refused, stats.garbled), (0, 0, 0), "{stats:?}");
    println!("{stats:?} in {rounds:?} rounds");
}

#[test]
fn nbdkit_may_be_killed_and_started_again() {
    if !have("nbdkit") {
        return;
    }
    let scratch = Scratch::new("kit-killed");
    let file = scratch.file("disk", 16 * MIB);
    // The delay has the requests under way when the server dies.
    let args = ["--filter=delay", "file", file.to_str().unwrap(), "rdelay=5ms", "wdelay=5ms"];
    let mut server = Server::nbdkit(&scratch, &args);
    let url = server.url("nbd", "", "");
    survive(&mut server, &url, 16 * MIB / PAGE);
}

#[test]
fn qemu_may_be_killed_and_started_again() {
    if !have("qemu-nbd") {
        return;
    }
    let scratch = Scratch::new("qemu-killed");
    let file = scratch.file("disk", 16 * MIB);
    let mut server = Server::qemu(&scratch, &["-f", "raw", "--shared=8", file.to_str().unwrap()]);
    let url = server.url("nbd", "", "");
    survive(&mut server, &url, 16 * MIB / PAGE);
}

/// Extents one after the other.
#[derive(Default)]
struct Source(AtomicU32);

impl ExtentSource for Source {
    fn lease(&self) -> Option<Extent> {
        let next = self.0.fetch_add(1, SeqCst);
        (next < 8).then_some(Extent(next))
    }

    fn release(&self, _: Extent, _: bool) {}
}

#[test]
fn device_survives_server_and_names_losses() {
    if !have("nbdkit") {
        return;
    }
    let scratch = Scratch::new("device");
    let file = scratch.file("disk", 16 * MIB);
    let mut server = Server::nbdkit(&scratch, &["file", file.to_str().unwrap()]);
    let impatient = Options {
        read_timeout: Duration::from_secs(2),
        write_timeout: Duration::from_millis(200),
        ..Options::default()
    };
    let (_, nbd) = connect_with(&server.url("nbd", "", ""), impatient).unwrap();
    let device = FileDevice::on_export(nbd, [3; 32], 1, Box::new(Source::default()));
    let pages: Vec<Page> = (0..300).map(|slot| contents(slot, 1)).collect();
    let mut codec = Compressor::default();
    for (slot, page) in pages.iter().enumerate() {
        let packed = codec.compress(page);
        assert!(matches!(packed, Packed::Raw(_)));
        device.write(&[(Slot(slot as u32), packed)]).unwrap();
    }
    let read = |slots: &[u32]| {
        let mut back = vec![[0u8; PAGE_SIZE]; slots.len()];
        let mut wanted: Vec<(Slot, &mut Page)> =
            slots.iter().map(|slot| Slot(*slot)).zip(&mut back).collect();
        device.read(&mut wanted).map(|()| back)
    };
    let some: Vec<u32> = (0..100).map(|i| i * 71 % 300).collect();
    let good: Vec<Page> = some.iter().map(|slot| pages[*slot as usize]).collect();
    assert!(read(&some).unwrap() == good);

    // Away: writes fail soon and leave the slots as they were, reads wait, then name a slot.
    server.kill();
    let start = Instant::now();
    let failed = device.write(&[(Slot(0), codec.compress(&pages[1]))]).unwrap_err();
    assert_eq!((failed.slot, failed.errno), (Slot(0), Errno::TIMEDOUT));
    assert!(start.elapsed() < Duration::from_secs(1));
    let failed = read(&[5]).unwrap_err();
    assert_eq!((failed.slot, failed.kind), (Slot(5), ReadErrorKind::Io(Errno::TIMEDOUT)));
    assert!(start.elapsed() >= Duration::from_secs(2));

    // And back.
    server.start_again();
    assert!(read(&some).unwrap() == good);
    std::thread::sleep(Duration::from_secs(1));
    device.write(&[(Slot(0), codec.compress(&pages[1]))]).unwrap();
    assert!(read(&[0, 1]).unwrap() == [pages[1]; 2]);

    // The disk was changed: no page is taken for another.
    server.kill();
    let mut bytes = std::fs::read(&file).unwrap();
    bytes.rotate_left(PAGE_SIZE);
    std::fs::write(&file, bytes).unwrap();
    server.start_again();
    let failed = read(&[7]).unwrap_err();
    assert_eq!((failed.slot, failed.kind), (Slot(7), ReadErrorKind::Authentication));
}

/// Sessions that are being pumped in this process for servers of this test alone: threads inherit
/// no name.
fn pumps() -> usize {
    let names = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with(b"swaptide-tls")).count()
}

/// What every server has to get right under TLS.
fn under_tls(server: &mut Server, export: &str, trusted: &Authority, blocks: u64) {
    let ca = format!("&ca={}", trusted.path("ca-cert.pem"));
    let good = server.url("nbds", export, &format!("{ca}&tls-hostname=swap.example"));
    let (_, nbd) = connect(&good).unwrap();
    Exercise::new(&nbd, blocks).run(40);
    assert_eq!(nbd.stats().broken, 0, "{:?}", nbd.stats());
    drop(nbd);

    // The wrong name, the wrong authority, no authority.
    let error = connect(&server.url("nbds", export, &ca)).map(drop).unwrap_err();
    assert!(matches!(&error, NbdError::Tls(_, rustls::Error::InvalidCertificate(_))), "{error}");
    let scratch = Scratch::new("foreign");
    let foreign = Authority::new(scratch.path("pki"));
    let foreign_ca = format!("&ca={}&tls-hostname=swap.example", foreign.path("ca-cert.pem"));
    let error = connect(&server.url("nbds", export, &foreign_ca)).map(drop).unwrap_err();
    assert!(matches!(&error, NbdError::Tls(_, rustls::Error::InvalidCertificate(_))), "{error}");

    // Where the server insists, TLS it is, with the same checks.
    let url = server.url("nbd", export, &format!("{ca}&tls-hostname=swap.example"));
    let (_, nbd) = connect(&url).unwrap();
    Exercise::new(&nbd, blocks).run(3);
    let error = connect(&server.url("nbd", export, &ca)).map(drop).unwrap_err();
    assert!(matches!(&error, NbdError::Tls(..)), "{error}");
    survive(server, &good, blocks);
}

#[test]
fn nbdkit_under_tls() {
    if !have("nbdkit") {
        return;
    }
    let scratch = Scratch::new("kit-tls");
    let authority = Authority::new(scratch.path("pki"));
    authority.sign("server", "swap.example");
    let file = scratch.file("disk", 16 * MIB);
    let certificates = format!("--tls-certificates={}", authority.directory().display());
    let args = [
        "--tls=require",
        &certificates,
        "--filter=delay",
        "file",
        file.to_str().unwrap(),
        "rdelay=1ms",
        "wdelay=1ms",
    ];
    let mut server = Server::nbdkit(&scratch, &args);
    under_tls(&mut server, "", &authority, 16 * MIB / PAGE);
}

#[test]
fn qemu_under_tls() {
    if !have("qemu-nbd") {
        return;
    }
    let scratch = Scratch::new("qemu-tls");
    let authority = Authority::new(scratch.path("pki"));
    authority.sign("server", "swap.example");
    let file = scratch.file("disk", 16 * MIB);
    let object = format!(
        "tls-creds-x509,id=tls0,endpoint=server,verify-peer=no,dir={}",
        authority.directory().display()
    );
    let args = [
        "--object",
        &object,
        "--tls-creds",
        "tls0",
        "-f",
        "raw",
        "-x",
        "swap",
        "--shared=8",
        file.to_str().unwrap(),
    ];
    let mut server = Server::qemu(&scratch, &args);
    under_tls(&mut server, "swap", &authority, 16 * MIB / PAGE);
}

#[test]
fn a_server_that_wants_to_know_its_clients_gets_a_certificate() {
    if !have("nbdkit") {
        return;
    }
    let scratch = Scratch::new("kit-peer");
    let authority = Authority::new(scratch.path("pki"));
    authority.sign("server", "swap.example");
    authority.sign("client", "client.example");
    let certificates = format!("--tls-certificates={}", authority.directory().display());
    let server = Server::nbdkit(
        &scratch,
        &["--tls=require", "--tls-verify-peer", &certificates, "memory", "8M"],
    );
    let base = format!("&ca={}&tls-hostname=swap.example", authority.path("ca-cert.pem"));
    let error = connect(&server.url("nbds", "", &base)).map(drop).unwrap_err();
    assert!(matches!(&error, NbdError::Tls(..) | NbdError::Talk(..)), "{error}");
    let ours = format!(
        "{base}&cert={}&key={}",
        authority.path("client-cert.pem"),
        authority.path("client-key.pem")
    );
    let (_, nbd) = connect(&server.url("nbds", "", &ours)).unwrap();
    Exercise::new(&nbd, 8 * MIB / PAGE).run(5);
}

#[test]
fn a_server_without_tls_is_refused_where_tls_is_required() {
    if !have("nbdkit") {
        return;
    }
    let scratch = Scratch::new("no-tls");
    let server = Server::nbdkit(&scratch, &["memory", "8M"]);
    let error = connect(&server.url("nbds", "", "")).map(drop).unwrap_err();
    assert!(matches!(&error, NbdError::NoTls(_) | NbdError::NoRoots), "{error}");

    let authority = Authority::new(scratch.path("pki"));
    authority.sign("server", "localhost");
    let other = Scratch::new("pumps");
    let certificates = format!("--tls-certificates={}", authority.directory().display());
    let mut server = Server::nbdkit(&other, &["--tls=require", &certificates, "memory", "8M"]);
    let url = server.url("nbds", "", &format!("&ca={}", authority.path("ca-cert.pem")));
    // In this process other tests have pumps, too, which come and go: enough of ours that those do
    // not matter. A thread has its name a moment after it was started.
    let until = |what: &str, good: fn(usize) -> bool| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !good(pumps()) {
            assert!(Instant::now() < deadline, "{what}: {} pumps", pumps());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let begun = || until("they begin", |pumps| pumps >= 30);
    let ended = || until("they end", |pumps| pumps <= 20);
    let connector = connector(&url).unwrap();
    let many: Vec<_> = (0..30).map(|_| connector.connect().unwrap()).collect();
    begun();
    // The process ends them, or the server does.
    drop(many);
    ended();
    let many: Vec<_> = (0..30).map(|_| connector.connect().unwrap()).collect();
    begun();
    server.kill();
    ended();
    for (fd, _) in many {
        assert_eq!(rustix::io::read(&fd, &mut [0; 16][..]), Ok(0));
    }
}
