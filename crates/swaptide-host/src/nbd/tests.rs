//! Negotiation with servers that follow a script: old ones, strange ones, hostile ones.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;

use proptest::prelude::*;

use super::*;
use crate::testing::Scratch;

const REPLY: u64 = 0x0003_e889_0455_65a9;
const HELLO: &[u8; 16] = b"NBDMAGICIHAVEOPT";
const ACK: u32 = 1;
const INFO: u32 = 3;
const ERROR: u32 = 1 << 31;
const STRUCTURED_REPLY: u32 = 8;
const GO: u32 = 7;
const EXPORT_NAME: u32 = 1;
const STARTTLS: u32 = 5;

/// The server's end of the one connection that a test makes.
struct Peer(UnixStream);

impl Peer {
    fn send(&mut self, bytes: &[u8]) {
        // The client may have hung up, with good reason.
        let _ = self.0.write_all(bytes);
    }

    fn hello(&mut self, flags: u16) {
        self.send(HELLO);
        self.send(&flags.to_be_bytes());
        let mut answer = [0; 4];
        let _ = self.0.read_exact(&mut answer);
        assert_eq!(u32::from_be_bytes(answer), u32::from(flags & 3), "the flags that both know");
    }

    /// The next option and its data.
    fn option(&mut self) -> Option<(u32, Vec<u8>)> {
        let mut head = [0; 16];
        self.0.read_exact(&mut head).ok()?;
        assert_eq!(head[..8], HELLO[8..], "no option");
        let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        let mut data = vec![0; number(12) as usize];
        self.0.read_exact(&mut data).ok()?;
        Some((number(8), data))
    }

    /// Takes the option that must come now.
    fn expect(&mut self, option: u32) -> Vec<u8> {
        let (came, data) = self.option().expect("an option");
        assert_eq!(came, option);
        data
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) {
        self.send(&reply(option, kind, data));
    }
}

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    [
        &REPLY.to_be_bytes()[..],
        &option.to_be_bytes(),
        &kind.to_be_bytes(),
        &(data.len() as u32).to_be_bytes(),
        data,
    ]
    .concat()
}

fn info_export(size: u64, flags: u16) -> Vec<u8> {
    [&0u16.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
}

fn info_sizes(least: u32, most: u32) -> Vec<u8> {
    [&3u16.to_be_bytes()[..], &least.to_be_bytes(), &4096u32.to_be_bytes(), &most.to_be_bytes()]
        .concat()
}

struct Lab {
    _scratch: Scratch,
    connector: Connector,
    server: JoinHandle<()>,
}

impl Lab {
    fn new(
        scheme: &str,
        export: &str,
        limit: Duration,
        script: impl FnOnce(&mut Peer) + Send + 'static,
    ) -> Lab {
        let scratch = Scratch::new("nbd");
        let socket = scratch.path("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || script(&mut Peer(listener.accept().unwrap().0)));
        let url = format!("{scheme}+unix:///{export}?socket={}", socket.display());
        let connector = Connector::with_limit(url.parse().unwrap(), limit).unwrap();
        Lab { _scratch: scratch, connector, server }
    }

    fn connect(self) -> Result<(OwnedFd, Export), NbdError> {
        let answer = self.connector.connect();
        self.server.join().expect("the client keeps to the protocol");
        answer
    }
}

const LIMIT: Duration = Duration::from_secs(20);

fn connect(script: impl FnOnce(&mut Peer) + Send + 'static) -> Result<(OwnedFd, Export), NbdError> {
    Lab::new("nbd", "disk", LIMIT, script).connect()
}

fn refused(script: impl FnOnce(&mut Peer) + Send + 'static) -> String {
    connect(script).expect_err("refused").to_string()
}

#[test]
fn negotiated_export_is_returned() {
    let (fd, export) = connect(|peer| {
        peer.hello(3);
        assert_eq!(peer.expect(STRUCTURED_REPLY), b"");
        peer.reply(STRUCTURED_REPLY, ACK, &[]);
        let go = peer.expect(GO);
        assert_eq!(
            go[..],
            [&4u32.to_be_bytes()[..], b"disk", &1u16.to_be_bytes(), &3u16.to_be_bytes()].concat()
        );
        // Information that was not asked for is no harm.
        peer.reply(GO, INFO, &[0, 2, b'x']);
        peer.reply(GO, INFO, &[0, 99]);
        peer.reply(GO, INFO, &info_sizes(512, 1 << 20));
        peer.reply(GO, INFO, &info_export(10 << 20 | 100, 0x12d));
        // The transmission phase begins at once: its first bytes must not get lost.
        peer.send(&[reply(GO, ACK, &[]), b"first bytes".to_vec()].concat());
    })
    .unwrap();
    assert_eq!(
        export,
        Export {
            size: 10 << 20,
            flags: Flags::from_bits_retain(0x12d),
            structured: true,
            longest: 1 << 20,
            connections: 4
        }
    );
    let mut first = [0; 11];
    UnixStream::from(fd).read_exact(&mut first).unwrap();
    assert_eq!(&first, b"first bytes");
}

#[test]
fn old_servers_are_asked_by_name() {
    for (flags, zeroes) in [(0, true), (1, true), (2, false), (3, false)] {
        let (_, export) = connect(move |peer| {
            peer.hello(flags);
            if flags & 1 != 0 {
                peer.expect(STRUCTURED_REPLY);
                peer.reply(STRUCTURED_REPLY, ERROR + 1, &[]);
                peer.expect(GO);
                peer.reply(GO, ERROR + 1, b"never heard of it");
            }
            assert_eq!(peer.expect(EXPORT_NAME), b"disk");
            peer.send(&[&(1u64 << 20).to_be_bytes()[..], &1u16.to_be_bytes()].concat());
            if zeroes {
                peer.send(&[0; 124]);
            }
        })
        .unwrap();
        assert_eq!(
            export,
            Export {
                size: 1 << 20,
                flags: Flags::from_bits_retain(1),
                structured: false,
                longest: 32 << 20,
                connections: 1
            }
        );
    }
    let message = refused(|peer| {
        peer.hello(2);
        peer.expect(EXPORT_NAME);
    });
    assert!(message.contains("no export of that name"), "{message}");
}

#[test]
fn a_refusal_is_told_with_the_servers_words_made_harmless() {
    for (number, part) in [
        (2, "does not allow it"),
        (6, "no export of that name"),
        (7, "shutting down"),
        (8, "block size"),
        (4711, "the server refuses"),
    ] {
        let message = refused(move |peer| {
            peer.hello(3);
            peer.expect(STRUCTURED_REPLY);
            peer.reply(STRUCTURED_REPLY, ERROR + 9, &[]);
            peer.expect(GO);
            let text = [b"\x1b[2Jgo\naway \xff ".as_slice(), &[b'x'; 4000]].concat();
            peer.reply(GO, ERROR + number, &text);
        });
        assert!(
            message.contains(part) && message.contains("the server says: [2Jgo away \u{fffd} x"),
            "{message}"
        );
        assert!(message.len() < 500 && !message.chars().any(char::is_control), "{message}");
    }
}

#[test]
fn exports_that_are_of_no_use_are_refused() {
    for (info, part) in [
        (vec![info_export(1 << 20, 3)], "read-only"),
        (vec![info_export(1 << 20, 0)], "an export without flags"),
        (vec![info_export(4095, 1)], "smaller than a page"),
        (vec![info_export(1 << 20, 1), info_sizes(8192, 1 << 20)], "8192 to 1048576"),
        (vec![info_export(1 << 20, 1), info_sizes(1, 2048)], "1 to 2048"),
        (vec![info_export(1 << 20, 1), info_sizes(0, 1 << 20)], "no power of two"),
        (vec![info_export(1 << 20, 1), info_sizes(513, 1 << 20)], "no power of two"),
        (vec![], "an export without a size"),
        (vec![info_export(1 << 20, 1)[..11].to_vec()], "information of a wrong length"),
        (vec![info_sizes(1, 1 << 20)[..13].to_vec()], "information of a wrong length"),
        (vec![vec![0]], "information without a kind"),
    ] {
        let message = refused(move |peer| {
            peer.hello(3);
            peer.expect(STRUCTURED_REPLY);
            peer.reply(STRUCTURED_REPLY, ACK, &[]);
            peer.expect(GO);
            for info in info {
                peer.reply(GO, INFO, &info);
            }
            peer.reply(GO, ACK, &[]);
        });
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn other_protocols_are_recognised() {
    let first = |bytes: Vec<u8>| refused(move |peer| peer.send(&bytes));
    assert!(first(b"HTTP/1.1 400 Bad Request".to_vec()).contains("not an NBD server"));
    assert!(first(b"NBDMAGIC_and_more".to_vec()).contains("not an NBD server"));
    assert!(
        first([b"NBDMAGIC".as_slice(), &[0, 0, 0x42, 2, 0x81, 0x86, 0x12, 0x53]].concat())
            .contains("newstyle mode")
    );
    assert!(first(Vec::new()).contains("closed the connection"));
    assert!(first(HELLO.to_vec()).contains("closed the connection"));

    let answer = |bytes: Vec<u8>| {
        refused(move |peer| {
            peer.hello(3);
            peer.expect(STRUCTURED_REPLY);
            peer.send(&bytes);
        })
    };
    assert!(answer(vec![0; 20]).contains("an invalid reply"));
    assert!(answer(reply(GO, ACK, &[])).contains("was not sent"));
    assert!(answer(reply(STRUCTURED_REPLY, INFO, &[])).contains("a malformed reply"));
    let mut long = reply(STRUCTURED_REPLY, ACK, &[]);
    long[16..].copy_from_slice(&u32::MAX.to_be_bytes());
    assert!(answer(long).contains("too long"));
    assert!(
        answer(reply(STRUCTURED_REPLY, ACK, &[])[..19].to_vec()).contains("closed the connection")
    );
    let endless = refused(|peer| {
        peer.hello(3);
        peer.expect(STRUCTURED_REPLY);
        peer.reply(STRUCTURED_REPLY, ACK, &[]);
        peer.expect(GO);
        for _ in 0..1000 {
            peer.reply(GO, INFO, &info_export(1 << 20, 1));
        }
    });
    assert!(endless.contains("too many replies"), "{endless}");
}

#[test]
fn a_server_that_says_nothing_or_little_has_an_end_of_time() {
    let limit = Duration::from_millis(300);
    for trickles in [false, true] {
        let start = Instant::now();
        let error = Lab::new("nbd", "disk", limit, move |peer| {
            for byte in HELLO.iter().chain(&[0, 3]) {
                if trickles {
                    peer.send(&[*byte]);
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        })
        .connect()
        .unwrap_err();
        assert!(error.to_string().contains("did not answer in time"), "{error}");
        assert!((limit..Duration::from_secs(10)).contains(&start.elapsed()));
        assert_eq!(error.errno(), Errno::TIMEDOUT);
    }
}

#[test]
fn an_nbds_url_cannot_be_downgraded_from_tls() {
    // Even if what comes would do without.
    for flags in [2, 3] {
        let lab = Lab::new("nbds", "disk", LIMIT, move |peer| {
            peer.hello(flags);
            if flags & 1 != 0 {
                peer.expect(STARTTLS);
                peer.send(&reply(STARTTLS, ERROR + 1, b"no"));
            }
            assert!(peer.option().is_none(), "nothing is asked without TLS");
        });
        let error = lab.connect().unwrap_err();
        assert!(matches!(error, NbdError::NoTls(_)), "{error}");
    }
    // What comes before the session is no part of it.
    let lab = Lab::new("nbds", "disk", LIMIT, |peer| {
        peer.hello(3);
        peer.expect(STARTTLS);
        let smuggled =
            [reply(STARTTLS, ACK, &[]), reply(STRUCTURED_REPLY, ACK, &[]), reply(GO, ACK, &[])]
                .concat();
        peer.send(&smuggled);
        let _ = peer.0.read_to_end(&mut Vec::new());
    });
    let error = lab.connect().unwrap_err();
    assert!(matches!(error, NbdError::Tls(..)), "{error}");
}

#[test]
fn certificates_and_names_that_are_none_are_named() {
    let scratch = Scratch::new("nbd-ca");
    let file = scratch.path("ca.pem");
    let message = || {
        let url = format!("nbds://localhost/x?ca={}", file.display());
        Connector::new(url.parse().unwrap()).map(drop).expect_err("refused").to_string()
    };
    assert!(message().contains("ca.pem: cannot be read: No such file"), "{}", message());
    std::fs::write(&file, "nothing\n").unwrap();
    assert!(message().contains("holds no certificates"), "{}", message());
    std::fs::write(&file, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        .unwrap();
    assert!(message().contains("ca.pem: "), "{}", message());
}

#[test]
fn an_export_that_has_shrunk_is_not_taken_again() {
    for (size, flags, good) in [
        (2u64 << 20, 0x2d, true),
        (3 << 20, 0x12d, true),
        (1 << 20, 0x2d, false),
        (2 << 20, 0x0d, false),
    ] {
        let lab = Lab::new("nbd", "", LIMIT, move |peer| {
            peer.hello(3);
            peer.expect(STRUCTURED_REPLY);
            peer.reply(STRUCTURED_REPLY, ACK, &[]);
            peer.expect(GO);
            peer.reply(GO, INFO, &info_export(size, flags));
            peer.reply(GO, ACK, &[]);
        });
        let before = Export {
            size: 2 << 20,
            flags: Flags::from_bits_retain(0x2d),
            structured: true,
            longest: 32 << 20,
            connections: 1,
        };
        let again = lab.connector.connect_again(&before);
        lab.server.join().unwrap();
        assert_eq!(again.is_ok(), good, "{size} {flags:#x}: {again:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever a server sends in any step, connecting ends in time, without a panic.
    #[test]
    fn noise_is_survived(
        steps in 0..3usize,
        kinds in prop::collection::vec((any::<u8>(), any::<u32>(), 0..300usize), 0..20),
        noise in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let lab = Lab::new("nbd", "disk", Duration::from_millis(500), move |peer| {
            if steps > 0 {
                peer.hello(3);
            }
            if steps > 1 {
                peer.expect(STRUCTURED_REPLY);
                peer.reply(STRUCTURED_REPLY, ACK, &[]);
                for (option, kind, len) in kinds {
                    let kind = if kind % 3 == 0 { kind % 16 } else { ERROR + kind % 12 };
                    peer.reply(
                        if option < 200 { GO } else { option.into() },
                        kind,
                        &vec![option; len],
                    );
                }
            }
            peer.send(&noise);
        });
        if let Ok((_, export)) = lab.connect() {
            prop_assert!(export.size >= 4096 && export.longest >= 4096);
        }
    }
}
