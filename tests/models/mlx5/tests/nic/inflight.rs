// SPDX-License-Identifier: MIT OR Apache-2.0

//! Destruction and revocation of a memory key while a transfer that uses the key is in flight. The operation must wait
//! for the transfer, and nothing may be written afterwards. Each case also runs without draining, where the test must
//! observe a stale write.

use p2pmem_mlx5::HoldRequest;
use p2pmem_mlx5::layout::{constants, ifc, op, wire};

use super::{adapter, loopback, pattern};
use p2pmem_mlx5_driver::{Driver, Qp, Refused, Ring, data, ended, remote, until};

/// Length of a transfer: one packet, so that the adapter writes it at once.
const LEN: usize = 1 << 10;

/// A connection with an RDMA WRITE by its own mkey, which is held in flight.
struct HeldWrite {
    driver: Driver,
    cq: Ring,
    qp: Qp,
    from: u64,
    to: u64,
    key: u32,
}

/// Creates an mkey of all memory that UMR work requests may change.
fn umr_key(driver: &mut Driver) -> u32 {
    let bits = [ifc::mkc::LR, ifc::mkc::LW, ifc::mkc::RR, ifc::mkc::RW, ifc::mkc::UMR_EN];
    driver.physical_key_with(driver.pd, &bits, 0x11)
}

impl HeldWrite {
    /// Creates a connection without posting the WRITE.
    fn idle(mut driver: Driver) -> Self {
        let (_, cq, qp) = loopback(&mut driver);
        let key = umr_key(&mut driver);
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
        until("held transfer", || held.driver.handle.held().held.then_some(()));
        assert_eq!(
            held.driver.read(held.to, LEN),
            vec![0; LEN],
            "a held transfer moved bytes"
        );
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

    /// Waits until the change of the mkey waits for the held transfer.
    fn wait_for_drain(&self) {
        until("wait for the held transfer", || {
            (self.driver.handle.held().draining == 1).then_some(())
        });
        let status = self.driver.handle.held();
        assert!(status.held && status.expired == 0, "{status:?}");
    }

    /// Overwrites the target memory, releases the transfer if it is still held, and returns whether the transfer
    /// changed the memory.
    fn stale_write(&mut self) -> bool {
        let other = pattern(LEN, 2);
        self.driver.write(self.to, &other);
        self.driver.handle.release();
        let entry = self.driver.wait(&mut self.cq);
        assert_eq!(ended(&entry).0, constants::MLX5_CQE_REQ, "the WRITE must succeed");
        self.driver.read(self.to, LEN) != other
    }

    /// Checks that a new access by the mkey fails.
    fn check_refused(&mut self) {
        let before = self.driver.read(self.to, LEN);
        self.post();
        let entry = self.driver.wait(&mut self.cq);
        // The QP is both ends of its connection: it enters the error state as responder, before the NAK arrives.
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

    fn wait_destroyed(&mut self, slot: u32) {
        self.driver.answer(slot, ifc::destroy_mkey_out::BYTES).unwrap();
    }

    /// Creates a CQ and a REG_UMR QP. Must be called before a transfer is held.
    fn umr_qp(driver: &mut Driver) -> (Ring, Qp) {
        let events = driver.event_queue(2, &[]);
        let cq = driver.completion_queue(events.number, super::LOG_ENTRIES, |_| {});
        let qp = driver.queue_pair(constants::MLX5_QP_ST_REG_UMR, &cq, |_| {});
        let lid = driver.lid();
        driver.connect(&qp, lid, qp.number);
        (cq, qp)
    }

    /// Posts a UMR work request that sets the mkey free.
    fn revoke(&mut self, qp: &mut Qp) {
        let mut body = vec![0; wire::wqe_umr_ctrl_seg::BYTES + wire::mkey_seg::BYTES];
        let mask = constants::MLX5_MKEY_MASK_FREE;
        wire::wqe_umr_ctrl_seg::MKEY_MASK.set(&mut body, mask);
        ifc::mkc::FREE.set(&mut body[wire::wqe_umr_ctrl_seg::BYTES..], 1_u32);
        self.driver.send(qp, constants::MLX5_OPCODE_UMR, self.key, &[body]);
    }
}

/// Returns whether the adapter owns an entry of the command queue.
fn is_outstanding(driver: &Driver, slot: u32) -> bool {
    driver.read(super::RAM + u64::from(slot) * 64 + 63, 1)[0] & 1 != 0
}

#[test]
fn destroying_a_key_waits_for_its_transfers() {
    let mut held = HeldWrite::new();
    held.destroy(1);
    held.wait_for_drain();
    assert!(is_outstanding(&held.driver, 1));
    // Meanwhile, registers are readable and the transfer does not continue.
    assert_eq!(held.driver.register(0x4) >> 16, 5);
    assert!(is_outstanding(&held.driver, 1) && held.driver.read(held.to, LEN) == vec![0; LEN]);
    held.driver.handle.release();
    held.wait_destroyed(1);
    assert_eq!(
        held.driver.read(held.to, LEN),
        pattern(LEN, 1),
        "the transfer must be complete when DESTROY_MKEY completes"
    );
    assert!(!held.stale_write(), "stale write after DESTROY_MKEY completed");
    held.check_refused();
    let again = held.driver.run(op::DESTROY_MKEY, 16, 16, |input| {
        ifc::destroy_mkey_in::MKEY_INDEX.set(input, held.key >> 8);
    });
    assert_eq!(again, Err(Refused::Status(super::BAD_RESOURCE)));
    let status = held.driver.handle.held();
    assert_eq!((status.draining, status.drains, status.expired), (0, 1, 0));
}

#[test]
fn destroyed_key_is_written_without_draining() {
    let mut held = HeldWrite::new();
    held.driver.handle.set_drain(false);
    held.destroy(1);
    held.wait_destroyed(1);
    assert!(held.driver.handle.held().held);
    assert!(
        held.stale_write(),
        "without draining, the held transfer must write after DESTROY_MKEY"
    );
    held.check_refused();
}

/// Revokes an mkey by a UMR work request on a REG_UMR QP.
fn check_revocation(drain: bool) {
    let mut driver = adapter();
    let (mut umr_cq, mut umr) = HeldWrite::umr_qp(&mut driver);
    driver.handle.set_drain(drain);
    let mut held = HeldWrite::idle(driver);
    held.driver.handle.hold(HoldRequest {
        write: Some(true),
        min_bytes: LEN as u64,
        ..HoldRequest::default()
    });
    held.post();
    until("held transfer", || held.driver.handle.held().held.then_some(()));
    held.revoke(&mut umr);
    if drain {
        held.wait_for_drain();
        assert!(held.driver.completion(&mut umr_cq).is_none());
        held.driver.handle.release();
    }
    let entry = held.driver.wait(&mut umr_cq);
    assert_eq!(ended(&entry).0, constants::MLX5_CQE_REQ);
    assert_eq!(held.driver.handle.held().held, !drain);
    assert_eq!(held.stale_write(), !drain);
    held.check_refused();
}

#[test]
fn revoking_a_key_waits_for_its_transfers() {
    check_revocation(true);
}

#[test]
fn revoked_key_is_written_without_draining() {
    check_revocation(false);
}

#[test]
fn other_keys_do_not_wait() {
    let mut held = HeldWrite::new();
    let other = umr_key(&mut held.driver);
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
fn reset_aborts_held_and_waiting_work() {
    let mut held = HeldWrite::new();
    held.destroy(1);
    held.wait_for_drain();
    held.driver.client().reset().unwrap();
    held.driver.enable_function();
    assert_eq!(
        held.driver.read(held.to, LEN),
        vec![0; LEN],
        "the reset must abort the held transfer"
    );
    let status = held.driver.handle.held();
    assert_eq!((status.held, status.draining), (false, 0));
    held.driver.init();
    let (_, mut cq, mut qp) = loopback(&mut held.driver);
    held.driver.send(&mut qp, constants::MLX5_OPCODE_NOP, 0, &[]);
    held.driver.wait(&mut cq);
}
