// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of groups whose ranks are threads of the test.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicUsize;
use std::sync::Condvar;
use std::thread;
use std::time::Duration;

use super::handshake::{Hello, HELLO, PROOF};
use super::record::Record;
use super::*;
use crate::local::LocalDirectory;

/// A limit that is never reached.
const LIMIT: Duration = Duration::from_secs(120);
/// A limit that is always reached.
const SHORT: Duration = Duration::from_millis(300);

fn options(rank: usize, limit: Duration) -> GroupOptions {
    GroupOptions {
        limit,
        address: Some(Ipv4Addr::LOCALHOST.into()),
        host: Some(format!("node-{}", (b'a' + rank as u8) as char)),
        silence: LIMIT,
    }
}

/// Runs `body` for each rank of a group. Returns the results in the order of the ranks.
fn each_rank<T: Send>(ranks: usize, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let (body, joined) = (&body, &Gate::new(ranks));
    thread::scope(|scope| {
        let all: Vec<_> = LocalDirectory::job(ranks)
            .into_iter()
            .enumerate()
            .map(|(rank, directory)| {
                scope.spawn(move || {
                    let group = Group::join(Box::new(directory), &options(rank, LIMIT)).unwrap();
                    // If a rank ended earlier, others could not join.
                    joined.wait();
                    body(group)
                })
            })
            .collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Returns the failure in an error.
fn failure(error: anyhow::Error) -> Failure {
    error.downcast().unwrap()
}

/// A barrier of the test's threads, which a panic of one of them does not block.
struct Gate {
    threads: usize,
    arrived: Mutex<usize>,
    changed: Condvar,
}

impl Gate {
    fn new(threads: usize) -> Self {
        Self {
            threads,
            arrived: Mutex::new(0),
            changed: Condvar::new(),
        }
    }

    fn wait(&self) {
        let mut arrived = self.arrived.lock().unwrap();
        *arrived += 1;
        self.changed.notify_all();
        let wanted = arrived.next_multiple_of(self.threads);
        let (_arrived, waited) = self
            .changed
            .wait_timeout_while(arrived, LIMIT, |arrived| *arrived < wanted)
            .unwrap();
        assert!(!waited.timed_out());
    }
}

/// Calls `check` until it fails.
fn notice(group: &Group) -> Failure {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Err(failure) = group.check() {
            return failure;
        }
        assert!(Instant::now() < deadline, "no failure");
        thread::yield_now();
    }
}

/// Waits in a barrier until the rank notices a failure.
fn wait_for_failure(group: &Group) -> Failure {
    failure(group.barrier(LIMIT).unwrap_err())
}

/// Returns the value of a rank in a round.
fn value(rank: usize, round: usize) -> Vec<u8> {
    let length = match round {
        5 => MAX_VALUE,
        _ => rank * 100 * round,
    };
    vec![(rank * 16 + round) as u8; length]
}

#[test]
fn exchanges_and_barriers_work_repeatedly() {
    for ranks in [1, 2, 3, 8] {
        each_rank(ranks, |group| {
            assert_eq!(group.ranks(), ranks);
            for round in 0..10 {
                let values = group.exchange(&value(group.rank(), round), LIMIT).unwrap();
                assert_eq!(values, (0..ranks).map(|rank| value(rank, round)).collect::<Vec<_>>());
                group.barrier(LIMIT).unwrap();
            }
            group.check().unwrap();
            assert_eq!(group.name(0), "rank 0 (node-a)");
            let text = group.exchange(&vec![0; MAX_VALUE + 1], LIMIT).unwrap_err().to_string();
            assert!(text.contains("too long"), "{text}");
            // The refused value disturbs nothing.
            group.barrier(LIMIT).unwrap();
            group.leave(LIMIT).unwrap();
        });
    }
}

#[test]
fn a_barrier_waits_for_all() {
    let entered = AtomicUsize::new(0);
    each_rank(4, |group| {
        for round in 1..=20 {
            entered.fetch_add(1, Ordering::SeqCst);
            group.barrier(LIMIT).unwrap();
            assert!(entered.load(Ordering::SeqCst) >= 4 * round);
        }
        group.leave(LIMIT).unwrap();
    });
}

#[test]
fn a_rank_that_does_not_start_is_named() {
    let mut all = LocalDirectory::job(3);
    all.truncate(2);
    thread::scope(|scope| {
        for (rank, directory) in all.into_iter().enumerate() {
            scope.spawn(move || {
                let error = Group::join(Box::new(directory), &options(rank, SHORT)).unwrap_err();
                let text = error.to_string();
                assert!(text.contains("rank 2 did not join within 300ms"), "{text}");
            });
        }
    });
}

/// A rank that publishes the record, and does nothing else.
fn publish(mut directory: LocalDirectory, record: &Record) {
    directory.exchange(&record.encode().unwrap(), LIMIT).unwrap();
}

#[test]
fn a_rank_that_does_not_connect_is_named() {
    for silent in 0..3 {
        // The kernel accepts connections, and nobody answers.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let token = [5; 16];
        let record = Record::new(
            "node-x",
            listener.local_addr().unwrap().port(),
            vec![Ipv4Addr::LOCALHOST.into()],
            Some(&token).filter(|_| silent == 0),
        );
        let record = &record;
        thread::scope(|scope| {
            for (rank, directory) in LocalDirectory::job(3).into_iter().enumerate() {
                if rank == silent {
                    scope.spawn(move || publish(directory, record));
                    continue;
                }
                scope.spawn(move || {
                    let limit = Duration::from_secs(3);
                    let error = Group::join(Box::new(directory), &options(rank, limit)).unwrap_err();
                    let (text, name) = (error.to_string(), format!("rank {silent} (node-x)"));
                    assert!(
                        text.contains(&name) && text.contains("did not join within 3s"),
                        "{text}"
                    );
                });
            }
        });
    }
}

#[test]
fn a_refused_connection_is_the_reason() {
    // A port without a listener.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let record = Record::new("node-x", port, vec![Ipv4Addr::LOCALHOST.into()], None);
    let mut all = LocalDirectory::job(2).into_iter();
    let (own, other) = (all.next().unwrap(), all.next().unwrap());
    thread::scope(|scope| {
        scope.spawn(|| publish(other, &record));
        let text = Group::join(Box::new(own), &options(0, SHORT)).unwrap_err().to_string();
        // On a slow machine, the directory's exchange takes all of the time.
        assert!(
            text.contains("rank 1") && text.contains("did not join within 300ms"),
            "{text}"
        );
        if text.contains("node-x") {
            assert!(
                text.contains(&format!("127.0.0.1:{port}: Connection refused")),
                "{text}"
            );
        }
    });
}

#[test]
fn a_rank_that_ends_is_the_failure_of_all_others() {
    let passed = Gate::new(4);
    let failures = each_rank(4, |group| {
        group.barrier(LIMIT).unwrap();
        passed.wait();
        if group.rank() == 2 {
            drop(group);
            return None;
        }
        let found = wait_for_failure(&group);
        assert_eq!(group.check(), Err(found.clone()));
        // Later calls fail with the same failure, immediately.
        assert_eq!(failure(group.exchange(&[1], LIMIT).unwrap_err()), found);
        assert_eq!(failure(group.leave(LIMIT).unwrap_err()), found);
        Some(found)
    });
    for (rank, failure) in failures.into_iter().enumerate() {
        assert_eq!(failure.is_none(), rank == 2);
        if let Some(failure) = failure {
            assert_eq!(failure.rank, 2);
            assert!(failure.what.starts_with("rank 2 (node-c) ended"), "{failure}");
        }
    }
}

#[test]
fn a_failure_is_noticed_without_a_call() {
    each_rank(2, |group| {
        if group.rank() == 1 {
            return;
        }
        // Only the watching thread works.
        let found = notice(&group);
        assert_eq!(found.what, "rank 1 (node-b) ended");
    });
}

#[test]
fn the_reason_of_an_abort_reaches_all() {
    let reason = format!("wrong\x1b[31m sum\n{}", "x".repeat(10_000));
    let ready = Gate::new(3);
    each_rank(3, |group| {
        group.barrier(LIMIT).unwrap();
        ready.wait();
        if group.rank() == 1 {
            group.abort(&reason);
            group.abort("another reason");
        }
        let found = wait_for_failure(&group);
        assert_eq!(found.rank, 1);
        assert!(
            found.what.starts_with("rank 1 (node-b) stopped: wrong[31m sumxxx"),
            "{found}"
        );
        assert!(found.what.len() < 400, "{}", found.what.len());
        // A later abort does not replace the first failure.
        ready.wait();
        group.abort("a consequence");
        assert_eq!(group.check(), Err(found));
        ready.wait();
    });
}

#[test]
fn a_failure_that_one_rank_noticed_reaches_all() {
    each_rank(3, |group| {
        if group.rank() == 0 {
            // Rank 2 is connected, but takes part in nothing.
            let found = failure(group.barrier(SHORT).unwrap_err());
            assert!(
                found.what.contains("not respond: no value arrived within 300ms"),
                "{found}"
            );
            return;
        }
        // No call of these ranks notices that they are late.
        let found = notice(&group);
        assert_eq!(found.rank, 1);
        assert!(found.what.ends_with(", as rank 0 (node-a) reports"), "{found}");
        assert!(
            found
                .what
                .starts_with("rank 1 (node-b) and rank 2 (node-c) do not respond"),
            "{found}"
        );
    });
}

#[test]
fn leaving_is_no_failure_unless_a_rank_is_needed() {
    let gone = Gate::new(3);
    each_rank(3, |group| {
        group.barrier(LIMIT).unwrap();
        gone.wait();
        if group.rank() == 0 {
            let text = failure(group.leave(LIMIT).unwrap_err()).what;
            assert!(text.starts_with("rank 0 (node-a) has left the group"), "{text}");
            gone.wait();
            return;
        }
        // The other ranks learn that rank 0 has left, and nothing fails, until an exchange needs rank 0.
        if group.rank() == 1 {
            let found = wait_for_failure(&group);
            assert_eq!(
                (found.rank, found.what.as_str()),
                (0, "rank 0 (node-a) has left the group")
            );
            drop(group);
            gone.wait();
            return;
        }
        let found = notice(&group);
        assert!(found.what.starts_with("rank 0 (node-a) has left the group"), "{found}");
        gone.wait();
    });
}

#[test]
fn a_rank_that_stays_in_the_group_is_named() {
    let done = Gate::new(2);
    each_rank(2, |group| {
        if group.rank() == 0 {
            let found = failure(group.leave(SHORT).unwrap_err());
            assert!(found.what.starts_with("rank 1 (node-b) does not respond"), "{found}");
            done.wait();
        } else {
            done.wait();
        }
    });
}

#[test]
fn progress_shows_who_has_not_come() {
    let (set, asked) = (Gate::new(3), Gate::new(3));
    each_rank(3, |group| {
        group.set_progress(10 + group.rank() as u64);
        set.wait();
        // The answers need no call of the other ranks.
        if group.rank() != 1 {
            assert_eq!(group.progress(LIMIT), [Some(10), Some(11), Some(12)]);
        }
        asked.wait();
        if group.rank() == 2 {
            drop(group);
            return;
        }
        let found = wait_for_failure(&group);
        assert_eq!(found.rank, 2);
        set_apart(&group);
    });
}

/// The answers after the end of rank 2: rank 0 asks, while rank 1 stays.
fn set_apart(group: &Group) {
    let progress = group.progress(LIMIT);
    assert_eq!(progress[group.rank()], Some(10 + group.rank() as u64));
    assert_eq!(progress[2], None);
}

/// A directory that does something with the records before its rank gets them.
struct Tampering<F> {
    inner: LocalDirectory,
    change: F,
}

impl<F: FnMut(&mut Vec<Vec<u8>>) + Send> Directory for Tampering<F> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn exchange(&mut self, own: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let mut values = self.inner.exchange(own, limit)?;
        (self.change)(&mut values);
        Ok(values)
    }
}

#[test]
fn another_version_is_named_by_all() {
    thread::scope(|scope| {
        for (rank, inner) in LocalDirectory::job(3).into_iter().enumerate() {
            scope.spawn(move || {
                let change = |values: &mut Vec<Vec<u8>>| {
                    let mut value: serde_json::Value = serde_json::from_slice(&values[1]).unwrap();
                    value["version"] = 99.into();
                    values[1] = value.to_string().into_bytes();
                };
                let directory = Tampering { inner, change };
                let text = Group::join(Box::new(directory), &options(rank, LIMIT))
                    .unwrap_err()
                    .to_string();
                assert!(
                    text.contains("rank 1 (node-b) speaks version 99") && text.contains("rank version 1"),
                    "{text}"
                );
            });
        }
    });
}

/// Makes connections to a rank that belong to no rank. They stay open.
fn strangers(at: SocketAddr, own: u32, kept: &mut Vec<TcpStream>) {
    let connect = || TcpStream::connect(at).unwrap();
    let mut send = |bytes: &[u8]| {
        let mut stream = connect();
        // Fails if the rank has closed the connection.
        let _ = stream.write_all(bytes);
        kept.push(stream);
    };
    // More silent ones than the rank keeps.
    (0..200).for_each(|_| send(&[]));
    send(b"GET / HTTP/1.1\r\n\r\n");
    send(&[0xff; 20_000]);
    for from in 0..4 {
        let hello = Hello { from, to: own }.encode().unwrap();
        send(&hello);
        send(&hello[..20]);
        // A wrong proof.
        send(&[&hello[..], &[7; PROOF]].concat());
        // Another version of the words.
        let mut other = hello;
        other[8] = 2;
        send(&other);
        send(&Hello { from, to: own + 1 }.encode().unwrap());
    }
    // These ones end.
    drop(connect());
}

#[test]
fn strangers_do_not_hinder_ranks() {
    thread::scope(|scope| {
        for (rank, inner) in LocalDirectory::job(3).into_iter().enumerate() {
            scope.spawn(move || {
                let mut kept = Vec::new();
                let change = |values: &mut Vec<Vec<u8>>| {
                    let record = Record::decode(rank, &values[rank]).unwrap();
                    let at = record.addresses().next().unwrap();
                    strangers(at, rank as u32, &mut kept);
                };
                // A borrowed closure, so that the connections stay open until the end.
                let mut directory = Tampering { inner, change };
                let mesh = Mesh::connect(&mut directory, &options(rank, LIMIT)).unwrap();
                let group = Group::new(mesh).unwrap();
                group.barrier(LIMIT).unwrap();
                group.leave(LIMIT).unwrap();
                assert!(kept.len() > 200);
            });
        }
    });
}

/// A program that listens where a rank is expected: it answers the hello without knowing the secret.
#[test]
fn a_rank_does_not_talk_to_a_stranger() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let record = Record::new("node-x", port, vec![Ipv4Addr::LOCALHOST.into()], None);
    let mut all = LocalDirectory::job(2).into_iter();
    let (own, other) = (all.next().unwrap(), all.next().unwrap());
    let limit = Duration::from_secs(3);
    thread::scope(|scope| {
        scope.spawn(|| publish(other, &record));
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut hello = [0; HELLO];
            // Fails if the connection is that of the end of this test.
            if stream.read_exact(&mut hello).is_err() {
                return;
            }
            assert_eq!(Hello::decode(&hello), Some(Hello { from: 0, to: 1 }));
            let answer = Hello { from: 1, to: 0 }.encode().unwrap();
            stream.write_all(&[&answer[..], &[9; PROOF]].concat()).unwrap();
            // The rank closes the connection, and sends no proof.
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest);
            assert!(rest.is_empty(), "{rest:?}");
            // Later tries fail, too.
            drop(listener);
        });
        let text = Group::join(Box::new(own), &options(0, limit)).unwrap_err().to_string();
        // Ends the wait for a connection that a slow rank has not made.
        drop(TcpStream::connect(("127.0.0.1", port)));
        assert!(text.contains("rank 1 (node-x) did not join within 3s"), "{text}");
    });
}

/// Sends `bytes` as rank 1 to rank 0. Returns the failure that `noticed` finds at rank 0.
fn failure_by(bytes: &[u8], noticed: fn(&Group) -> Failure) -> Failure {
    let mut all = LocalDirectory::job(2).into_iter();
    let (own, mut other) = (all.next().unwrap(), all.next().unwrap());
    thread::scope(|scope| {
        let rank = scope.spawn(|| {
            let group = Group::join(Box::new(own), &options(0, LIMIT)).unwrap();
            noticed(&group)
        });
        let mut mesh = Mesh::connect(&mut other, &options(1, LIMIT)).unwrap();
        let mut stream = mesh.streams[0].take().unwrap();
        stream.set_nonblocking(false).unwrap();
        stream.write_all(bytes).unwrap();
        // The connection ends from the other side.
        let found = rank.join().unwrap();
        drop(stream);
        found
    })
}

/// Connects the ranks of a job. No rank watches its connections, so that a test decides what arrives before a rank looks.
fn meshes(ranks: usize) -> Vec<Mesh> {
    thread::scope(|scope| {
        let connect = |(rank, mut directory): (usize, LocalDirectory)| {
            scope.spawn(move || Mesh::connect(&mut directory, &options(rank, LIMIT)).unwrap())
        };
        let all: Vec<_> = LocalDirectory::job(ranks)
            .into_iter()
            .enumerate()
            .map(connect)
            .collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Returns the connection of a rank to another one. Reads and writes block.
fn blocking(mesh: &mut Mesh, to: usize) -> TcpStream {
    let stream = mesh.streams[to].take().unwrap();
    stream.set_nonblocking(false).unwrap();
    stream
}

fn send(mut stream: &TcpStream, message: &Message) {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    stream.write_all(&bytes).unwrap();
}

/// Reads the next message of a connection.
fn receive(mut stream: &TcpStream) -> Message {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut bytes = length.to_vec();
    bytes.resize(4 + u32::from_le_bytes(length) as usize, 0);
    stream.read_exact(&mut bytes[4..]).unwrap();
    let mut decoder = frame::Decoder::default();
    decoder.feed(&bytes);
    decoder.next().unwrap().unwrap()
}

/// Waits until what the other side has sent, and its end, has arrived.
fn await_end(stream: &TcpStream) {
    use rustix::event::{poll, PollFd, PollFlags};
    poll(&mut [PollFd::new(stream, PollFlags::RDHUP)], None).unwrap();
}

/// Rank 2 sends its reason to rank 1 and ends. Then rank 0 ends, as if the launcher killed it. Rank 1 looks after both.
#[test]
fn a_reason_comes_before_the_ends_that_it_causes() {
    for reason in [Some("the memory was revoked"), None] {
        let mut all = meshes(3);
        let (two, one, zero) = (all.pop().unwrap(), all.pop().unwrap(), all.pop().unwrap());
        if let Some(reason) = reason {
            let what = format!("rank 2 (node-c) stopped: {reason}");
            send(two.streams[1].as_ref().unwrap(), &Message::Failed { rank: 2, what });
        }
        drop(two);
        await_end(one.streams[2].as_ref().unwrap());
        drop(zero);
        await_end(one.streams[0].as_ref().unwrap());
        let found = notice(&Group::new(one).unwrap());
        match reason {
            Some(reason) => assert_eq!((found.rank, found.what.contains(reason)), (2, true), "{found}"),
            None => assert_eq!((found.rank, found.what.as_str()), (0, "rank 0 (node-a) ended")),
        }
    }
}

/// As before, but the reason arrives after rank 1 has seen that only the connection of rank 0 has something to read.
#[test]
fn a_reason_that_arrives_while_a_rank_looks_comes_before_an_end() {
    let mut all = meshes(3);
    let (two, one, zero) = (all.pop().unwrap(), all.pop().unwrap(), all.pop().unwrap());
    let shared = watch::Shared::new(one).unwrap();
    let connections = shared.flush().unwrap();
    let all: Vec<(usize, &TcpStream)> = connections.iter().map(|(rank, stream, _)| (*rank, &**stream)).collect();
    let what = "rank 2 (node-c) stopped: the memory was revoked".to_owned();
    send(two.streams[1].as_ref().unwrap(), &Message::Failed { rank: 2, what });
    drop((two, zero));
    all.iter().for_each(|(_, stream)| await_end(stream));
    shared.read_all(&all[..1], &all);
    assert_eq!(shared.check().unwrap_err().rank, 2);
}

/// Rank 1 has all values, fails because of them, and ends. Rank 2 has sent nothing to rank 0.
#[test]
fn a_reason_comes_before_the_end_of_an_exchange() {
    let mut all = meshes(3);
    let (mut two, one, zero) = (all.pop().unwrap(), all.pop().unwrap(), all.pop().unwrap());
    let value = Message::Value {
        number: 0,
        bytes: vec![2],
    };
    let to_one = blocking(&mut two, 1);
    send(&to_one, &value);
    thread::scope(|scope| {
        let waits = scope.spawn(|| wait_for_failure(&Group::new(zero).unwrap()));
        scope.spawn(|| {
            let group = Group::new(one).unwrap();
            group.exchange(&[1], LIMIT).unwrap();
            group.abort("the values differ");
        });
        // Rank 2 does not watch: the end of its connection stands for its answer.
        while !matches!(receive(&to_one), Message::Query { .. }) {}
        drop(to_one);
        let found = waits.join().unwrap();
        assert_eq!(found.what, "rank 1 (node-b) stopped: the values differ");
    });
}

#[test]
fn an_abort_waits_for_ranks_that_have_not_read_the_reason() {
    let mut all = meshes(2);
    let (one, zero) = (all.pop().unwrap(), all.pop().unwrap());
    let group = Group::new(zero).unwrap();
    let start = Instant::now();
    group.abort("wrong sum");
    assert!(start.elapsed() >= ABORT);
    // What rank 1 reads in the end is complete.
    let found = notice(&Group::new(one).unwrap());
    assert_eq!(found.what, "rank 0 (node-a) stopped: wrong sum");
}

/// A rank prints its error before it says that it ends, and ends after the others have said so.
#[test]
fn a_failed_rank_prints_before_others_end() {
    let mut all = meshes(2);
    let (mut one, zero) = (all.pop().unwrap(), all.pop().unwrap());
    let stream = blocking(&mut one, 0);
    let printed = AtomicUsize::new(0);
    thread::scope(|scope| {
        let rank = scope.spawn(|| {
            let start = Instant::now();
            let failed = |_: &Group| -> Result<()> { anyhow::bail!("wrong sum") };
            let result = Group::new(zero).unwrap().run(LIMIT, failed, |error| {
                assert_eq!(error.to_string(), "wrong sum");
                printed.fetch_add(1, Ordering::SeqCst);
            });
            assert!(result.is_none());
            start.elapsed()
        });
        let what = "rank 0 (node-a) stopped: wrong sum".into();
        assert_eq!(receive(&stream), Message::Failed { rank: 0, what });
        let Message::Query { number } = receive(&stream) else {
            panic!("no query")
        };
        send(&stream, &Message::Answer { number, calls: 0 });
        assert_eq!(receive(&stream), Message::Bye);
        assert_eq!(printed.load(Ordering::SeqCst), 1);
        // This rank says nothing.
        assert!(rank.join().unwrap() >= PARTING);
    });
}

#[test]
fn a_part_that_succeeds_ends_the_membership() {
    let results = each_rank(3, |group| {
        let own = vec![group.rank() as u8];
        let part = |group: &Group| group.exchange(&own, LIMIT);
        group.run(LIMIT, part, |error| panic!("{error:#}"))
    });
    assert_eq!(results, vec![Some(vec![vec![0], vec![1], vec![2]]); 3]);
}

/// A directory that hides the last ranks of the job.
struct Shortened {
    inner: LocalDirectory,
    ranks: usize,
}

impl Directory for Shortened {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn exchange(&mut self, own: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let mut values = self.inner.exchange(own, limit)?;
        values.truncate(self.ranks);
        Ok(values)
    }
}

/// Rank 2 waits for rank 3. Rank 1 sends its reason, and then rank 0 ends, as if the launcher killed it.
#[test]
fn a_reason_comes_before_an_end_while_ranks_join() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let record = Record::new("node-x", port, vec![Ipv4Addr::LOCALHOST.into()], None);
    let mut all = LocalDirectory::job(4);
    let (three, mut two) = (all.pop().unwrap(), all.pop().unwrap());
    thread::scope(|scope| {
        scope.spawn(|| publish(three, &record));
        let joining = scope.spawn(move || Mesh::connect(&mut two, &options(2, LIMIT)).unwrap_err());
        let connect = |(rank, inner)| {
            let mut directory = Shortened { inner, ranks: 3 };
            scope.spawn(move || Mesh::connect(&mut directory, &options(rank, LIMIT)).unwrap())
        };
        let others: Vec<_> = all.into_iter().enumerate().map(connect).collect();
        let others: Vec<Mesh> = others.into_iter().map(|rank| rank.join().unwrap()).collect();
        let what = "rank 1 (node-b) stopped: wrong options".to_owned();
        send(
            others[1].streams[2].as_ref().unwrap(),
            &Message::Failed { rank: 1, what },
        );
        let mut others = others.into_iter();
        drop(others.next());
        let text = joining.join().unwrap().to_string();
        assert_eq!(text, "rank 1 (node-b) stopped: wrong options");
    });
}

#[test]
fn invalid_messages_are_a_failure_of_their_sender() {
    let encode = |messages: &[Message]| {
        let mut bytes = Vec::new();
        messages.iter().for_each(|message| message.encode(&mut bytes));
        bytes
    };
    let value = |number| Message::Value { number, bytes: vec![] };
    let failed = |rank| Message::Failed { rank, what: "x".into() };
    for (bytes, part) in [
        (u32::MAX.to_le_bytes().to_vec(), "sent a message of 4294967295 bytes"),
        (vec![1, 0, 0, 0, 77], "sent an unknown message (kind 77)"),
        (vec![2, 0, 0, 0, 5, 5], "sent a damaged message (kind 5)"),
        (encode(&[value(7)]), "sent a value of another exchange"),
        (encode(&[Message::Bye, value(0)]), "sent a value of another exchange"),
        // A rank may be one exchange ahead, and rank 0 has begun none.
        (encode(&[value(0), value(1)]), "sent a value of another exchange"),
        (encode(&[failed(2)]), "sent a failure of a rank that does not exist"),
    ] {
        let found = failure_by(&bytes, notice);
        assert!(found.rank == 1 && found.what.contains(part), "{found}");
    }
    let found = failure_by(&encode(&[Message::Bye]), wait_for_failure);
    assert_eq!(
        (found.rank, found.what.as_str()),
        (1, "rank 1 (node-b) has left the group")
    );
    let found = failure_by(&encode(&[failed(0)]), notice);
    assert_eq!((found.rank, found.what.as_str()), (0, "x, as rank 1 (node-b) reports"));
}

#[test]
fn a_rank_that_fails_while_others_join_is_named() {
    // Rank 2 publishes its record, and never connects. Rank 1 connects to rank 0, and ends.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let record = Record::new("node-x", port, vec![Ipv4Addr::LOCALHOST.into()], None);
    let mut all = LocalDirectory::job(3).into_iter();
    let (own, mut one, two) = (all.next().unwrap(), all.next().unwrap(), all.next().unwrap());
    thread::scope(|scope| {
        scope.spawn(|| publish(two, &record));
        // The limit of rank 1 ends, which it reports to rank 0, whose limit never ends.
        scope.spawn(move || Mesh::connect(&mut one, &options(1, Duration::from_secs(3))).unwrap_err());
        let text = Group::join(Box::new(own), &options(0, LIMIT)).unwrap_err().to_string();
        assert!(
            text.starts_with("rank 1 (node-b) stopped: rank 2 (node-x) did not join within 3s"),
            "{text}"
        );
    });
}

#[test]
fn an_address_of_another_host_is_refused() {
    let directory = LocalDirectory::job(1).remove(0);
    let options = GroupOptions {
        address: Some("192.0.2.1".parse().unwrap()),
        ..options(0, LIMIT)
    };
    let text = format!("{:#}", Group::join(Box::new(directory), &options).unwrap_err());
    assert!(
        text.starts_with("listening on 192.0.2.1: is it an address of this host?"),
        "{text}"
    );
}

#[test]
fn the_addresses_of_the_host_work() {
    thread::scope(|scope| {
        for directory in LocalDirectory::job(2) {
            scope.spawn(|| {
                let options = GroupOptions {
                    limit: LIMIT,
                    ..GroupOptions::default()
                };
                let group = Group::join(Box::new(directory), &options).unwrap();
                group.barrier(LIMIT).unwrap();
                group.leave(LIMIT).unwrap();
            });
        }
    });
}
