# Hashes and strings larger than the budget, and children that are forked one in the other.
use strict;
use warnings;
my $entries = shift;

sub value { my ($i, $turn) = @_; return join(":", $i, $turn, ($i * 7919 + $turn) x 3) }

sub check {
    my ($data, $turn) = @_;
    for my $i (0 .. $entries - 1) {
        my $expected = value($i, $i % 3 == 0 ? $turn : 0);
        return 0 if $data->{$i} ne $expected;
    }
    return 1;
}

my %data = map { $_ => value($_, 0) } 0 .. $entries - 1;
for my $turn (1 .. 3) {
    my $pid = fork // die "fork: $!";
    if ($pid == 0) {
        $data{$_ * 3} = value($_ * 3, $turn) for 0 .. ($entries - 1) / 3;
        my $inner = fork // die "fork: $!";
        exit(check(\%data, $turn) ? 5 : 6) if $inner == 0;
        waitpid $inner, 0;
        exit(($? >> 8) == 5 && check(\%data, $turn) ? 7 : 8);
    }
    my $said = `echo child $turn`;
    waitpid $pid, 0;
    print "turn $turn: child ", $? >> 8, ", parent ", check(\%data, 0), ", $said";
}
