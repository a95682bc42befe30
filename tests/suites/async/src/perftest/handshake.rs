// SPDX-License-Identifier: MIT OR Apache-2.0

//! The messages that two programs of perftest exchange by TCP before and after a test, without rdma_cm.
//!
//! The client connects. In each step the client writes a message, and the server reads it and writes its own, which has the
//! same length. A message is one write, because perftest reads each with one call.
//!
//! | step | message |
//! |---|---|
//! | versions | 16 bytes: a number as text, then NUL |
//! | size of a page, size of a cache line | 4 bytes each, big-endian; for the layout of perftest's buffers |
//! | path MTU | 2 bytes: a digit (`enum ib_mtu`), then NUL |
//! | descriptions of the queue pairs | 59 bytes: [`Description`] |
//!
//! Later each side repeats its description to say that it has reached a point of the test ([`Connection::meet`]).
//! Facts: `src/perftest_communication.c` and `src/send_bw.c` of perftest 25.01.0-0.80, which calls itself 6.24.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The version that this side claims. From 6.28 on, both sides exchange more, unless one of them is older.
const VERSION: &str = "6.24";
/// The oldest version that perftest 6.24 accepts.
const OLDEST: f64 = 5.70;
const VERSION_BYTES: usize = 16;
const PAGE: u32 = 4096;
const CACHE_LINE: u32 = 64;
/// Bytes of a description, with the NUL at its end.
pub const LINE: usize = 59;

/// What a side says about its queue pair: seven hexadecimal numbers, with colons between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Description {
    /// Local identifier (LID) of the port.
    pub lid: u16,
    /// READs and atomics of the other side that this side executes at the same time.
    pub reads: u16,
    /// Number of the queue pair: 24 bits.
    pub qpn: u32,
    /// First packet number that this side sends: 24 bits.
    pub psn: u32,
    /// Remote key of the buffer for READs and WRITEs.
    pub rkey: u32,
    /// Address of this buffer.
    pub address: u64,
    /// Number of a shared receive queue.
    pub srqn: u32,
}

impl Description {
    /// Encodes the description.
    pub fn encode(&self) -> [u8; LINE] {
        let text = format!(
            "{:04x}:{:04x}:{:06x}:{:06x}:{:08x}:{:016x}:{:08x}\0",
            self.lid,
            self.reads,
            self.qpn & 0xff_ffff,
            self.psn & 0xff_ffff,
            self.rkey,
            self.address,
            self.srqn
        );
        let mut line = [0; LINE];
        line.copy_from_slice(text.as_bytes());
        line
    }

    /// Decodes a description.
    ///
    /// # Errors
    ///
    /// The line has no end, or does not have seven numbers, or a number is too large.
    pub fn decode(line: &[u8; LINE]) -> Result<Self> {
        let Some(text) = before_nul(line) else {
            bail!(
                "the other side describes its queue pair with more than {} characters: {:?}; perftest does so on Ethernet and with a GID index (-x), which this program does not support",
                LINE - 1,
                String::from_utf8_lossy(line)
            );
        };
        let wrong = || {
            format!(
                "the other side describes its queue pair with {:?}: expected are LID, READs, QP number, packet number, key, address, and SRQ number",
                String::from_utf8_lossy(text)
            )
        };
        let fields = text.split(|byte| *byte == b':').map(hexadecimal);
        let fields: Option<Vec<u64>> = fields.collect();
        let fields = fields.with_context(wrong)?;
        let [lid, reads, qpn, psn, rkey, address, srqn] = fields[..] else {
            bail!(wrong());
        };
        let bits24 = |value: u64| u32::try_from(value).ok().filter(|value| *value <= 0xff_ffff);
        Ok(Self {
            lid: lid.try_into().ok().with_context(wrong)?,
            reads: reads.try_into().ok().with_context(wrong)?,
            qpn: bits24(qpn).with_context(wrong)?,
            psn: bits24(psn).with_context(wrong)?,
            rkey: rkey.try_into().ok().with_context(wrong)?,
            address,
            srqn: srqn.try_into().ok().with_context(wrong)?,
        })
    }
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(digits).ok()?;
    let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    u64::from_str_radix(text, 16).ok().filter(|_| digits)
}

/// Returns the bytes before the first NUL.
fn before_nul(bytes: &[u8]) -> Option<&[u8]> {
    bytes.iter().position(|byte| *byte == 0).map(|end| &bytes[..end])
}

/// Encodes a version.
fn encode_version(version: &str) -> [u8; VERSION_BYTES] {
    let mut bytes = [0; VERSION_BYTES];
    bytes[..version.len()].copy_from_slice(version.as_bytes());
    bytes
}

/// Checks the version of the other side.
fn check_version(bytes: &[u8; VERSION_BYTES]) -> Result<()> {
    let text = String::from_utf8_lossy(before_nul(bytes).unwrap_or(bytes));
    let digits = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let number = text.parse::<f64>().ok().filter(|_| digits);
    let number =
        number.with_context(|| format!("the other side says that it has version {text:?}: is it perftest?"))?;
    ensure!(
        number >= OLDEST,
        "the other side has version {text} of perftest: {OLDEST:.2} or later is needed, because earlier ones exchange other messages"
    );
    Ok(())
}

/// Encodes a path MTU.
fn encode_mtu(mtu: u8) -> [u8; 2] {
    [b'0' + mtu, 0]
}

/// Decodes a path MTU.
fn decode_mtu(bytes: [u8; 2]) -> Result<u8> {
    match bytes {
        [digit @ b'1'..=b'5', 0] => Ok(digit - b'0'),
        other => bail!("the other side sent the path MTU {other:?}: a digit from 1 to 5 is expected"),
    }
}

/// Which end of the connection this side is. The client writes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// This side has connected.
    Client,
    /// This side has accepted the connection.
    Server,
}

/// A connection to a program of perftest.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    role: Role,
    deadline: Instant,
}

impl Connection {
    /// Uses a TCP connection. Every wait ends with an error at the deadline.
    ///
    /// # Errors
    ///
    /// The connection has ended.
    pub fn new(stream: TcpStream, role: Role, deadline: Instant) -> Result<Self> {
        stream.set_nodelay(true).context("preparing the connection")?;
        Ok(Self { stream, role, deadline })
    }

    /// Exchanges versions, sizes of pages and cache lines, and path MTUs. Returns the path MTU of the other side.
    ///
    /// # Errors
    ///
    /// The other side is not perftest or has an old version; the connection ended; the deadline has passed.
    pub fn greet(&mut self, mtu: u8) -> Result<u8> {
        check_version(&self.exchange("version", &encode_version(VERSION))?)?;
        for (what, near) in [("page size", PAGE), ("cache line size", CACHE_LINE)] {
            let far = u32::from_be_bytes(self.exchange(what, &near.to_be_bytes())?);
            ensure!(
                (1..=i32::MAX as u32).contains(&far),
                "the other side sent the {what} {far}, which is out of range"
            );
        }
        decode_mtu(self.exchange("path MTU", &encode_mtu(mtu))?)
    }

    /// Exchanges descriptions of the queue pairs.
    ///
    /// # Errors
    ///
    /// Those of [`Description::decode`]; the connection ended; the deadline has passed.
    pub fn describe(&mut self, near: &Description) -> Result<Description> {
        Description::decode(&self.exchange("queue pair's description", &near.encode())?)
    }

    /// Waits until both sides have reached `point`.
    ///
    /// # Errors
    ///
    /// Those of [`Connection::describe`]; the other side sent another description than before.
    pub fn meet(&mut self, point: &str, near: &Description, far: &Description) -> Result<()> {
        let again = self.describe(near).with_context(|| format!("at this point: {point}"))?;
        ensure!(
            again == *far,
            "at this point: {point}: the other side describes another queue pair than before ({again:x?}, before {far:x?}); this program supports one (-q 1)"
        );
        Ok(())
    }

    /// Sends a message and receives that of the other side.
    fn exchange<const N: usize>(&mut self, what: &str, near: &[u8; N]) -> Result<[u8; N]> {
        if self.role == Role::Client {
            self.write(what, near)?;
            return self.read(what);
        }
        let far = self.read(what)?;
        self.write(what, near)?;
        Ok(far)
    }

    fn write(&mut self, what: &str, bytes: &[u8]) -> Result<()> {
        let left = left(self.deadline).with_context(|| format!("sending this side's {what}"))?;
        self.stream.set_write_timeout(Some(left))?;
        let sent = self.stream.write_all(bytes);
        sent.with_context(|| format!("sending this side's {what}: see the other side's output"))
    }

    fn read<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        let mut got = 0;
        while got < N {
            let left = left(self.deadline);
            let left = left.with_context(|| format!("{got} of {N} bytes of the other side's {what} have arrived"))?;
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut bytes[got..]) {
                Ok(0) => {
                    bail!("the other side ended the connection after {got} of {N} bytes of its {what}: see its output")
                }
                Ok(more) => got += more,
                // At the deadline, the next round fails.
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => {
                    let what = format!("receiving the other side's {what}: see its output");
                    return Err(error).context(what);
                }
            }
        }
        Ok(bytes)
    }
}

/// Returns the time until a deadline.
///
/// # Errors
///
/// The deadline has passed.
pub fn left(deadline: Instant) -> Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    ensure!(!left.is_zero(), "the time limit has passed");
    Ok(left)
}

/// Accepts a connection.
///
/// # Errors
///
/// No program has connected at the deadline.
pub fn accept(listener: &TcpListener, deadline: Instant) -> Result<TcpStream> {
    loop {
        let left = left(deadline).context("waiting for a program that connects")?;
        let left = Timespec::try_from(left).context("the time limit is too long")?;
        match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&left)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(listener.accept().context("accepting a connection")?.0),
            Err(error) => return Err(error).context("waiting for a program that connects"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use super::*;

    /// Far beyond what a loaded machine needs.
    const LONG: Duration = Duration::from_secs(120);

    /// Returns a connection in a role, and the other side.
    fn pair(role: Role, limit: Duration) -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let deadline = Instant::now() + limit;
        let near = accept(&listener, Instant::now() + LONG).unwrap();
        (Connection::new(near, role, deadline).unwrap(), far)
    }

    fn text(error: &anyhow::Error) -> String {
        format!("{error:#}")
    }

    /// Returns the error of a client whose server answers with `messages`, one after the other, and then ends.
    fn greeting(messages: &[&[u8]]) -> String {
        let (mut near, mut far) = pair(Role::Client, LONG);
        for message in messages {
            far.write_all(message).unwrap();
        }
        far.shutdown(Shutdown::Write).unwrap();
        text(&near.greet(5).unwrap_err())
    }

    const EXAMPLE: Description = Description {
        lid: 3,
        reads: 16,
        qpn: 0x12_3456,
        psn: 0xab_cdef,
        rkey: 0x8000_0123,
        address: 0x7f12_3456_7000,
        srqn: 0,
    };

    #[test]
    fn a_description_has_the_form_of_perftest() {
        let line = EXAMPLE.encode();
        assert_eq!(&line, b"0003:0010:123456:abcdef:80000123:00007f1234567000:00000000\0");
        assert_eq!(Description::decode(&line).unwrap(), EXAMPLE);
    }

    #[test]
    fn numbers_of_a_description_keep_their_width() {
        let large = Description {
            lid: u16::MAX,
            reads: u16::MAX,
            qpn: u32::MAX,
            psn: u32::MAX,
            rkey: u32::MAX,
            address: u64::MAX,
            srqn: u32::MAX,
        };
        let decoded = Description::decode(&large.encode()).unwrap();
        assert_eq!((decoded.qpn, decoded.psn), (0xff_ffff, 0xff_ffff));
        assert_eq!((decoded.rkey, decoded.address), (u32::MAX, u64::MAX));
    }

    #[test]
    fn a_garbage_description_is_an_error() {
        let decode = |text: &str| {
            let mut line = [0; LINE];
            line[..text.len()].copy_from_slice(text.as_bytes());
            Description::decode(&line)
        };
        assert!(decode("1:1:2:3:4:5:6").is_ok());
        for wrong in [
            "",
            "no numbers at all",
            "1:1:2:3:4:5",
            "1:1:2:3:4:5:6:7",
            "1:1:2:3:4:5:",
            "1:1:2:3:4:5:+6",
            "1:1:2:3:4:5:-6",
            "1:1:2:3:4:0x5:6",
            "10000:1:2:3:4:5:6",
            "1:10000:2:3:4:5:6",
            "1:1:1000000:3:4:5:6",
            "1:1:2:1000000:4:5:6",
            "1:1:2:3:100000000:5:6",
            "1:1:2:3:4:10000000000000000:6",
            "1:1:2:3:4:5:100000000",
        ] {
            let error = text(&decode(wrong).unwrap_err());
            assert!(
                error.contains("LID, READs, QP number") && error.contains(wrong),
                "{error}"
            );
        }
    }

    #[test]
    fn a_description_without_an_end_is_an_error() {
        // The beginning of a line with a GID.
        let mut line = *b"0003:0010:123456:abcdef:80000123:00007f1234567000:fe:80:00:";
        let error = text(&Description::decode(&line).unwrap_err());
        assert!(
            error.contains("more than 58 characters") && error.contains("-x"),
            "{error}"
        );
        line[58] = 0;
        assert!(Description::decode(&line).is_err());
    }

    #[test]
    fn only_versions_with_this_handshake_are_accepted() {
        for good in ["5.70", "5.7", "6.24", "6.28", "26.07", "6.24\0garbage"] {
            check_version(&encode_version(good)).unwrap();
        }
        let error = |version: &str| text(&check_version(&encode_version(version)).unwrap_err());
        for old in ["5.6", "5.69", "4.5", "0"] {
            assert!(error(old).contains("5.70 or later"), "{}", error(old));
        }
        for wrong in ["", "six", "inf", "nan", "-6", "6.24 beta", "1e9", "GET / HTTP/1.1\r\n"] {
            assert!(error(wrong).contains("is it perftest?"), "{}", error(wrong));
        }
    }

    #[test]
    fn path_mtus_are_digits() {
        for mtu in 1..=5 {
            assert_eq!(decode_mtu(encode_mtu(mtu)).unwrap(), mtu);
        }
        for wrong in [*b"0\0", *b"6\0", *b"12", *b"\0\0"] {
            assert!(decode_mtu(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn both_roles_understand_each_other() {
        let (mut near, far) = pair(Role::Server, LONG);
        let client = std::thread::spawn(move || {
            let mut far = Connection::new(far, Role::Client, Instant::now() + LONG).unwrap();
            let mtu = far.greet(3).unwrap();
            let other = far.describe(&EXAMPLE).unwrap();
            far.meet("the end", &EXAMPLE, &other).unwrap();
            (mtu, other)
        });
        let server = Description { lid: 9, ..EXAMPLE };
        assert_eq!(near.greet(5).unwrap(), 3);
        assert_eq!(near.describe(&server).unwrap(), EXAMPLE);
        near.meet("the end", &server, &EXAMPLE).unwrap();
        assert_eq!(client.join().unwrap(), (5, server));
    }

    #[test]
    fn the_client_writes_what_perftest_expects() {
        let (mut near, mut far) = pair(Role::Client, LONG);
        for message in [
            &encode_version("6.24")[..],
            &4096_u32.to_be_bytes(),
            &64_u32.to_be_bytes(),
            b"4\0",
        ] {
            far.write_all(message).unwrap();
        }
        assert_eq!(near.greet(5).unwrap(), 4);
        let mut written = [0; 26];
        far.read_exact(&mut written).unwrap();
        assert_eq!(
            &written,
            b"6.24\0\0\0\0\0\0\0\0\0\0\0\0\x00\x00\x10\x00\x00\x00\x00\x405\0"
        );
    }

    #[test]
    fn a_server_writes_nothing_before_it_has_read() {
        let (mut near, mut far) = pair(Role::Server, LONG);
        far.write_all(b"6.24").unwrap();
        far.shutdown(Shutdown::Write).unwrap();
        let error = text(&near.greet(5).unwrap_err());
        assert!(error.contains("after 4 of 16 bytes of its version"), "{error}");
        drop(near);
        assert_eq!(far.read(&mut [0; 1]).unwrap(), 0);
    }

    #[test]
    fn a_connection_that_ends_early_is_an_error_with_the_place() {
        let version = encode_version("6.24");
        let (page, line) = (4096_u32.to_be_bytes(), 64_u32.to_be_bytes());
        for (messages, place) in [
            (&[][..], "0 of 16 bytes of its version"),
            (&[&version[..7]][..], "7 of 16 bytes of its version"),
            (&[&version[..]][..], "0 of 4 bytes of its page size"),
            (&[&version[..], &page[..]][..], "0 of 4 bytes of its cache line size"),
            (
                &[&version[..], &page[..], &line[..], b"5"][..],
                "1 of 2 bytes of its path MTU",
            ),
        ] {
            let error = greeting(messages);
            assert!(
                error.contains("ended the connection") && error.contains(place),
                "{error}"
            );
        }
        let (mut near, far) = pair(Role::Client, LONG);
        far.shutdown(Shutdown::Write).unwrap();
        let error = text(&near.describe(&EXAMPLE).unwrap_err());
        assert!(
            error.contains("0 of 59 bytes of its queue pair's description"),
            "{error}"
        );
    }

    #[test]
    fn wrong_values_of_a_greeting_are_errors() {
        let version = encode_version("6.24");
        let (page, line) = (4096_u32.to_be_bytes(), 64_u32.to_be_bytes());
        let error = greeting(&[b"220 mail server "]);
        assert!(error.contains("is it perftest?"), "{error}");
        let error = greeting(&[&encode_version("5.33")]);
        assert!(error.contains("5.33") && error.contains("5.70 or later"), "{error}");
        let error = greeting(&[&version, &[0; 4]]);
        assert!(error.contains("the page size 0"), "{error}");
        let error = greeting(&[&version, &page, &[0xff; 4]]);
        assert!(error.contains("the cache line size 4294967295"), "{error}");
        let error = greeting(&[&version, &page, &line, b"9\0"]);
        assert!(error.contains("path MTU [57, 0]"), "{error}");
    }

    #[test]
    fn another_queue_pair_in_the_middle_is_an_error() {
        let (mut near, mut far) = pair(Role::Client, LONG);
        let other = Description { qpn: 7, ..EXAMPLE };
        far.write_all(&EXAMPLE.encode()).unwrap();
        far.write_all(&other.encode()).unwrap();
        near.meet("receives are posted", &EXAMPLE, &EXAMPLE).unwrap();
        let error = near.meet("the end", &EXAMPLE, &EXAMPLE).unwrap_err();
        let error = text(&error);
        assert!(
            error.contains("the end") && error.contains("another queue pair"),
            "{error}"
        );
    }

    #[test]
    fn a_deadline_that_has_passed_is_an_error() {
        let (mut near, _far) = pair(Role::Client, Duration::ZERO);
        let error = text(&near.greet(5).unwrap_err());
        assert!(
            error.contains("this side's version") && error.contains("time limit"),
            "{error}"
        );
        let (mut near, _far) = pair(Role::Server, Duration::ZERO);
        let error = text(&near.greet(5).unwrap_err());
        assert!(
            error.contains("0 of 16 bytes") && error.contains("time limit"),
            "{error}"
        );
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = text(&accept(&listener, Instant::now()).unwrap_err());
        assert!(
            error.contains("that connects") && error.contains("time limit"),
            "{error}"
        );
    }

    #[test]
    fn a_wait_for_half_a_message_ends_at_the_deadline() {
        // The other side never sends the rest, so the result is the same however slow the machine is.
        let (mut near, mut far) = pair(Role::Server, Duration::from_millis(200));
        far.write_all(&encode_version("6.24")[..5]).unwrap();
        let error = text(&near.greet(5).unwrap_err());
        assert!(error.contains("of 16 bytes") && error.contains("time limit"), "{error}");
    }

    #[test]
    fn a_connection_that_was_reset_is_an_error() {
        let (mut near, far) = pair(Role::Client, LONG);
        // Closing with unread bytes resets the connection.
        near.write("version", &encode_version(VERSION)).unwrap();
        far.peek(&mut [0; 1]).unwrap();
        drop(far);
        let error = text(&near.describe(&EXAMPLE).unwrap_err());
        assert!(error.contains("description: see"), "{error}");
    }
}
