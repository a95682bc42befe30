// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory keys that end while a transfer by them is in flight: the end waits for the transfer, and nothing is written
//! after it. Each case runs with draining switched off as well, and has to see a stale write then.

use p2pmem_mlx5::HoldRequest;
use p2pmem_mlx5::layout::{constants, ifc, op, wire};

use super::driver::{Driver, Qp, Refused, Ring, data, ended, remote, until};
use super::{adapter, lid, loopback, pattern};

/// One packet, which is written at once.
const LEN: usize = 1 << 10;

/// A connection on which a write by a key of its own is held in flight.
struct Held {
    driver: Driver,
    cq: Ring,
    qp: Qp,
    from: u64,
    to: u64,
    key: u32,
}

/// A key of all memory that work requests may change.
fn changeable_key(driver: &mut Driver) -> u32 {
    let bits = [ifc::mkc::LR, ifc::mkc::LW, ifc::mkc::RR, ifc::mkc::RW, ifc::mkc::UMR_EN];
    driver.physical_key_with(driver.pd, &bits, 0x11)
}

impl Held {
    /// With nothing posted yet.
    fn idle(mut driver: Driver) -> Self {
        let (_, cq, qp) = loopback(&mut driver);
        let key = changeable_key(&mut driver);
        let (from, to) = (driver.alloc(LEN as u64), driver.alloc(LEN as u64));
        driver.write(from, &pattern(LEN, 1));
        Self {
            driver,
            cq,
            qp,
            from,
            to,
            key,
        }
    }

    fn new() -> Self {
        let mut held = Self::idle(adapter());
        held.driver.handle.hold(HoldRequest {
            qpn: Some(held.qp.number),
            write: Some(true),
            min_bytes: LEN as u64,
        });
        held.post();
        until("the write's translation", || {
            held.driver.handle.held().held.then_some(())
        });
        assert_eq!(held.driver.read(held.to, LEN), vec![0; LEN], "no byte has been moved");
        held
    }

    fn post(&mut self) {
        let segments = [
            remote(self.key, self.to),
            data((self.driver.key, self.from, LEN as u32)),
        ];
        self.driver
            .send(&mut self.qp, constants::MLX5_OPCODE_RDMA_WRITE, 0, &segments);
    }

    /// Waits until the end of the key waits, which it does for as long as the transfer is held.
    fn waits(&self) {
        until("the wait for the transfer", || {
            (self.driver.handle.held().draining == 1).then_some(())
        });
        let status = self.driver.handle.held();
        assert!(status.held && status.expired == 0, "{status:?}");
    }

    /// Uses the memory for other contents, releases the transfer if it is still held, and returns whether the transfer wrote to
    /// the memory.
    fn is_written_to(&mut self) -> bool {
        let other = pattern(LEN, 2);
        self.driver.write(self.to, &other);
        self.driver.handle.release();
        let entry = self.driver.wait(&mut self.cq);
        assert_eq!(ended(&entry).0, constants::MLX5_CQE_REQ, "the write itself was in time");
        self.driver.read(self.to, LEN) != other
    }

    /// What begins after the end of the key is refused.
    fn is_refused(&mut self) {
        let before = self.driver.read(self.to, LEN);
        self.post();
        let entry = self.driver.wait(&mut self.cq);
        // The queue pair is both ends of its connection: refusing the write ends it before the refusal arrives.
        assert_eq!(ended(&entry).0, constants::MLX5_CQE_REQ_ERR);
        assert_eq!(self.driver.handle.report().unwrap().transport.remote_access_errors, 1);
        assert_eq!(self.driver.read(self.to, LEN), before);
    }

    fn destroy(&mut self, slot: u32) {
        let mut input = vec![0; ifc::destroy_mkey_in::BYTES];
        ifc::nop_in::OPCODE.set(&mut input, op::DESTROY_MKEY);
        ifc::destroy_mkey_in::MKEY_INDEX.set(&mut input, self.key >> 8);
        self.driver.submit(slot, &input, ifc::destroy_mkey_out::BYTES);
    }

    fn destroyed(&mut self, slot: u32) {
        self.driver.answer(slot, ifc::destroy_mkey_out::BYTES).unwrap();
    }

    /// The driver's own queue pair for changes of keys, which it makes before anything is held.
    fn changes(driver: &mut Driver) -> (Ring, Qp) {
        let events = driver.event_queue(2, &[]);
        let cq = driver.completion_queue(events.number, super::LOG_ENTRIES, |_| {});
        let qp = driver.queue_pair(constants::MLX5_QP_ST_REG_UMR, &cq, |_| {});
        let lid = lid(driver);
        driver.connect(&qp, lid, qp.number);
        (cq, qp)
    }

    /// Posts a change that frees the key.
    fn revoke(&mut self, qp: &mut Qp) {
        let mut body = vec![0; wire::wqe_umr_ctrl_seg::BYTES + wire::mkey_seg::BYTES];
        let mask = constants::MLX5_MKEY_MASK_FREE;
        wire::wqe_umr_ctrl_seg::MKEY_MASK.set(&mut body, mask);
        ifc::mkc::FREE.set(&mut body[wire::wqe_umr_ctrl_seg::BYTES..], 1_u32);
        self.driver.send(qp, constants::MLX5_OPCODE_UMR, self.key, &[body]);
    }
}

/// Returns the ownership bit of an entry of the command queue.
fn is_outstanding(driver: &Driver, slot: u32) -> bool {
    driver.read(super::RAM + u64::from(slot) * 64 + 63, 1)[0] & 1 != 0
}

#[test]
fn destroying_a_key_waits_for_its_transfers() {
    let mut held = Held::new();
    held.destroy(1);
    held.waits();
    assert!(is_outstanding(&held.driver, 1));
    // Registers are answered meanwhile, and the transfer is where it was.
    assert_eq!(held.driver.register(0x4) >> 16, 5);
    assert!(is_outstanding(&held.driver, 1) && held.driver.read(held.to, LEN) == vec![0; LEN]);
    held.driver.handle.release();
    held.destroyed(1);
    assert_eq!(
        held.driver.read(held.to, LEN),
        pattern(LEN, 1),
        "written before the end"
    );
    assert!(!held.is_written_to(), "a write after the key was destroyed");
    held.is_refused();
    let again = held.driver.run(op::DESTROY_MKEY, 16, 16, |input| {
        ifc::destroy_mkey_in::MKEY_INDEX.set(input, held.key >> 8);
    });
    assert_eq!(again, Err(Refused::Status(super::BAD_RESOURCE)));
    let status = held.driver.handle.held();
    assert_eq!((status.draining, status.drains, status.expired), (0, 1, 0));
}

#[test]
fn without_draining_a_destroyed_key_is_written_by() {
    let mut held = Held::new();
    held.driver.handle.set_drain(false);
    held.destroy(1);
    held.destroyed(1);
    assert!(held.driver.handle.held().held);
    assert!(held.is_written_to(), "the transfer was held, and went on");
    held.is_refused();
}

/// The same by a work request on the driver's own queue pair.
fn revoked(drain: bool) {
    let mut driver = adapter();
    let (mut changes, mut umr) = Held::changes(&mut driver);
    driver.handle.set_drain(drain);
    let mut held = Held::idle(driver);
    held.driver.handle.hold(HoldRequest {
        write: Some(true),
        min_bytes: LEN as u64,
        ..HoldRequest::default()
    });
    held.post();
    until("the write's translation", || {
        held.driver.handle.held().held.then_some(())
    });
    held.revoke(&mut umr);
    if drain {
        held.waits();
        assert!(held.driver.completion(&mut changes).is_none());
        held.driver.handle.release();
    }
    let entry = held.driver.wait(&mut changes);
    assert_eq!(ended(&entry).0, constants::MLX5_CQE_REQ);
    assert_eq!(held.driver.handle.held().held, !drain);
    assert_eq!(held.is_written_to(), !drain);
    held.is_refused();
}

#[test]
fn revoking_a_key_waits_for_its_transfers() {
    revoked(true);
}

#[test]
fn without_draining_a_revoked_key_is_written_by() {
    revoked(false);
}

#[test]
fn other_keys_do_not_wait() {
    let mut held = Held::new();
    let other = changeable_key(&mut held.driver);
    held.driver
        .run(op::DESTROY_MKEY, 16, 16, |input| {
            ifc::destroy_mkey_in::MKEY_INDEX.set(input, other >> 8);
        })
        .unwrap();
    let status = held.driver.handle.held();
    assert!(status.held && status.drains == 0, "{status:?}");
    held.driver.handle.release();
    held.driver.wait(&mut held.cq);
}

#[test]
fn a_reset_ends_what_is_held_and_what_waits() {
    let mut held = Held::new();
    held.destroy(1);
    held.waits();
    held.driver.client().reset().unwrap();
    held.driver.switch_on();
    assert_eq!(held.driver.read(held.to, LEN), vec![0; LEN], "the transfer was aborted");
    let status = held.driver.handle.held();
    assert_eq!((status.held, status.draining), (false, 0));
    held.driver.init();
    let (_, mut cq, mut qp) = loopback(&mut held.driver);
    held.driver.send(&mut qp, constants::MLX5_OPCODE_NOP, 0, &[]);
    held.driver.wait(&mut cq);
}
