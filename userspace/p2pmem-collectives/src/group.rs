//! Stub.
#![allow(missing_docs)]
use anyhow::Result;
use std::time::Duration;
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what}")]
pub struct Failure {
    pub rank: usize,
    pub what: String,
}
pub trait Directory: Send {}
#[derive(Debug, Clone, Default)]
pub struct GroupOptions {
    pub limit: Duration,
}
pub struct Group;
impl Group {
    pub fn join(_: Box<dyn Directory>, _: GroupOptions) -> Result<Group> {
        unimplemented!()
    }
    pub fn rank(&self) -> usize {
        unimplemented!()
    }
    pub fn ranks(&self) -> usize {
        unimplemented!()
    }
    pub fn name(&self, _: usize) -> &str {
        unimplemented!()
    }
    pub fn exchange(&self, _: &[u8], _: Duration) -> Result<Vec<Vec<u8>>> {
        unimplemented!()
    }
    pub fn barrier(&self, _: Duration) -> Result<()> {
        unimplemented!()
    }
    pub fn check(&self) -> Result<(), Failure> {
        unimplemented!()
    }
    pub fn wait_for_failure(&self, _: Duration) -> Result<(), Failure> {
        unimplemented!()
    }
    pub fn abort(&self, _: &str) {
        unimplemented!()
    }
    pub fn set_progress(&self, _: u64) {
        unimplemented!()
    }
    pub fn progress(&self, _: Duration) -> Result<Vec<Option<u64>>> {
        unimplemented!()
    }
    pub fn leave(self, _: Duration) -> Result<()> {
        unimplemented!()
    }
}
