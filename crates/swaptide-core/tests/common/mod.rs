//! What the tests of single calls share.

use swaptide_core::*;

pub const CPU: CpuId = CpuId(0);
pub const G: GroupId = GroupId(5);

pub fn ty(n: u8) -> SwapType {
    SwapType::new(n).unwrap()
}

pub fn order(n: u8) -> Order {
    Order::new(n).unwrap()
}
